"""`accept-head generate`: a file of prompts in, a file of responses and their statistics out."""

from __future__ import annotations

from pathlib import Path

from accept_head.errors import InputError
from accept_head.files import writable_file, write_json
from accept_head.inference.decode.file import FileJob, summary_path
from accept_head.inference.decode.generate import check_tenants
from accept_head.inference.decode.loop import Decoder
from accept_head.inference.decode.unfinished import Unfinished
from accept_head.inference.engine.attention.choice import Attention
from accept_head.inference.engine.cache import Compile
from accept_head.inference.policies.drafting import check_lossless
from accept_head.inference.policies.registry import make_policy
from accept_head.inference.policy import Verifier
from accept_head.inference.verbs.options import explained
from accept_head.inference.verbs.terminal import Terminal
from accept_head.pair import context_tokens, load_pair
from accept_head.prompts import load_prompts
from accept_head.sampling import Sampling


@explained
def generate_file(
    target: str,
    draft: str,
    prompts: str,
    out: str,
    policy: str = "fixed:4",
    field: str = "prompt",
    max_prompts: int | None = None,
    batch_size: int = 8,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 50,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: list[str] | None = None,
    seed: int = 0,
    verifier: Verifier = "ratio",
    allow_lossy: bool = False,
    dtype: str = "auto",
    compile: Compile = "none",
    attention: Attention = "auto",
    stream: bool | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Decode prompts speculatively: one JSON object a response, and a summary of the rates.

    Args:
        target: Target model: a folder or a name on the Hub.
        draft: Draft model, with the target's tokenizer.
        prompts: JSONL file, or a data set's name.
        out: JSONL file to write; FILE.stats.json beside it holds the summary.
        policy: How many tokens to draft; `accept-head --list-policies` prints what there is.
        field: Field of a prompt record: text, or a list of chat messages.
        max_prompts: Use the first so many prompts.
        batch_size: Prompts decoded together; the next one takes the place of one that is finished.
        max_new_tokens: Longest response, in tokens.
        temperature: Sampling temperature; 0 is greedy.
        top_k: Most likely tokens kept when sampling; 0 keeps all.
        top_p: Probability mass kept when sampling; 1 keeps all.
        min_p: Least probability kept, as a share of the most likely token's; 0 keeps all.
        repetition_penalty: Above 1, tokens that stand in the text already become less likely.
        stop: Texts that end a response.
        seed: Seed; a prompt's response depends on it and on nothing around it.
        verifier: How candidates are tested when sampling: ratio, with probability min(1, p/q), or match, if a token
            drawn from the target is the same.
        allow_lossy: Let a policy run whose sampled output is not distributed as the target's.
        dtype: float32, bfloat16, float16, or auto.
        compile: {compile}
        attention: {attention}
        stream: Show responses as they come (with batch_size 1), only on a terminal when left out; false shows nothing.
        trust_remote_code: Run model code that comes with the checkpoint.
    """
    path = writable_file(Path(out))
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    pair = load_pair(target, draft, dtype=dtype, trust_remote_code=trust_remote_code)
    room = min(context_tokens(pair.target), context_tokens(pair.draft)) - max_new_tokens
    loaded = load_prompts(prompts, pair.tokenizer, field=field, max_prompts=max_prompts, max_prompt_tokens=max(room, 0))
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}, expected a positive integer")
    chosen = make_policy(policy, pair)
    check_lossless(chosen, verifier, greedy=sampling.greedy, allow_lossy=allow_lossy)
    check_tenants(chosen, [prompt.tenant for prompt in loaded])
    job = FileJob(
        target=target,
        draft=draft,
        pair=pair,
        prompts=loaded,
        spec=policy,
        policy=chosen,
        sampling=sampling,
        repetition_penalty=repetition_penalty,
        stop=stop or [],
        max_new_tokens=max_new_tokens,
        seed=seed,
        verifier=verifier,
        allow_lossy=allow_lossy,
    )
    settings = job.settings()
    unfinished = Unfinished(path, settings)
    if unfinished.records:
        print(f"going on: {len(unfinished.records)} of {len(loaded)} responses are there")

    def show(decoder: Decoder, requests: int) -> Terminal:
        print(decoder.memory)
        return Terminal(pair.tokenizer, requests, one_row=decoder.batch == 1, wanted=stream)

    rates = job.decode(unfinished, show, batch_size=batch_size, compile=compile, attention=attention)
    summary = rates | settings
    write_json(summary_path(path), summary)
    print(
        f"{summary['responses']} responses, {summary['generated']} tokens in {summary['seconds']:.1f} s; "
        f"drafted {summary['drafted']}, accepted {summary['accepted']}; discard rate {summary['discard_rate']:.3f}, "
        f"verification rate {summary['verification_rate']:.3f}, "
        f"block efficiency {summary['block_efficiency']:.2f} tokens a target forward"
    )
    print(f"wrote {path}")
