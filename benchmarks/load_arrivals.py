"""Question: when requests come as they came to a real service, how soon are they answered with `costs=auto`?

SmolLM2-135M-Instruct with its EAGLE-3 drafter in our loop, bfloat16, T = 1. The first REQUESTS of Azure's conversation
trace arrive in its rhythm, so fast that the target alone would be busy for LOAD of the time; at most ROWS are decoded
together. Each gets a test prompt, and an answer as long as the trace says, of NEW_TOKENS at most. Arms are those of
`load.py`. One arm after the other has all arrivals, REPEATS times, in random order; one fixed K goes twice (the floor).
Latency is from arrival to the last token. A request is in time if it takes at most so much per token as nine of ten
take with the target alone.

python benchmarks/load_arrivals.py     # 25 minutes on 2 cores; goes on where it was
"""

from __future__ import annotations

import json
from typing import Any

from load import HEAD, PAIRS, specs_of
from real_pair import prompts_file
from record import REPOSITORY, write_result

from accept_head.command.allocator import keep_freed_blocks
from accept_head.files import read_json
from accept_head.inference.verbs.bench import bench

TRACE = REPOSITORY.parent / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv_2023.csv"
REQUESTS, ROWS, NEW_TOKENS, LOAD, REPEATS = 100, 8, 96, 0.8, 2
OF_AN_ARM = ("latency", "latency_speedup", "queueing", "time_per_token", "slo_attainment", "throughput")


def main() -> None:
    keep_freed_blocks()
    served, out = PAIRS["smollm2"], REPOSITORY / "runs" / "load" / "arrivals.json"
    specs = specs_of(served.heads[1.0])
    bench(
        served.target,
        served.draft,
        str(prompts_file("test")),
        str(out),
        policy=[specs["head"], specs[HEAD]],
        fixed=[1, 2],
        batch_size=[ROWS],
        temperature=[1.0],
        top_k=0,
        max_new_tokens=NEW_TOKENS,
        repeats=REPEATS,
        trace=[str(TRACE)],
        trace_requests=REQUESTS,
        load=LOAD,
        dtype="bfloat16",
    )
    (cell,) = read_json(out)["traces"]
    arms = {specs["head"]: "head", specs[HEAD]: HEAD}
    rows = {arms.get(row["name"], row["name"]): {name: row[name] for name in OF_AN_ARM} for row in cell["policies"]}
    write_result("load_arrivals", {**about(cell), "specs": arms, "policies": rows})
    print(json.dumps(rows, indent=1))


def about(cell: dict[str, Any]) -> dict[str, Any]:
    names = ("requests", "prompts_by", "trace_seconds", "time_scale", "load", "slo_limits", "noise")
    return {"trace": TRACE.name, "rows": ROWS, "new_tokens": NEW_TOKENS, **{name: cell[name] for name in names}}


if __name__ == "__main__":
    main()
