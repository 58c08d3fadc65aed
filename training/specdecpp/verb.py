"""`accept-head import-specdecpp`: files of the SpecDec++ research code → a head, or traces that train one."""

from __future__ import annotations

from pathlib import Path

from accept_head.errors import InputError
from accept_head.files import writable_folder
from accept_head.sampling import Sampling
from accept_head.training.specdecpp.checkpoint import read_checkpoint, save_imported
from accept_head.training.specdecpp.traces import DataPair, import_records


def import_specdecpp(
    out: str,
    checkpoint: str | None = None,
    data: str | None = None,
    target: str | None = None,
    draft: str | None = None,
    score: bool = True,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    shard_size: int = 64,
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Turn what the SpecDec++ research code leaves into a head (--checkpoint) or into traces (--data).

    Imported traces train heads. They are not dev traces, nor can they be replayed: the target did not say the text
    together with the drawn tokens.

    Args:
        out: Folder for the head, or for the traces.
        checkpoint: Their acceptance head: a folder or Hub name with config.json and model.safetensors.
        data: Their JSON file, with the fields prefix, tokens, draft and p_acc.
        target: Of `data`: the target that said the responses, a folder or Hub name.
        draft: Of `data`: the draft that drew the tokens.
        score: Let the target read the responses too, for what the data do not say: overlap, target_logprob and
            divergence. Without it they stay unknown, and the traces can only train heads that predict `token`.
        temperature: Of the distributions that p_acc was computed from; the research code's are plain softmaxes.
        top_k: Likewise; 0 keeps all.
        top_p: Likewise; 1 keeps all.
        min_p: Likewise; 0 keeps all.
        shard_size: Records in one shard.
        dtype: auto, float32, bfloat16 or float16; of the models.
        device_map: `auto` spreads the target over all devices.
        trust_remote_code: Run model code that comes with the models.
    """
    if (checkpoint is None) == (data is None):
        given = "neither of them is" if data is None else "both are"
        raise InputError(f"one of --checkpoint and --data says what to import, but {given} given")
    if shard_size < 1:
        raise InputError(f"shard_size is {shard_size}, expected a positive integer")
    if checkpoint is not None:
        if target is not None or draft is not None:
            raise InputError("--target and --draft are of --data: a checkpoint does not say which pair it is of")
        head = read_checkpoint(checkpoint)
        writable_folder(Path(out).parent)
        save_imported(head, Path(out), checkpoint)
        print(f"{out}: depth {head.config.depth}, hidden size {head.config.hidden_size}, predicts token")
        return
    if target is None or draft is None:
        raise InputError(
            f"--data takes --target and --draft, but --{'target' if target is None else 'draft'} is missing"
        )
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    models = DataPair.load(target, draft, score, dtype, device_map, trust_remote_code)
    config = import_records(Path(str(data)), models, sampling, Path(out), shard_size=shard_size)
    print(f"{out}: {config.num_prompts} traces in {config.num_shards} shards")
