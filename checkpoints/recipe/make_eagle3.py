"""Makes an EAGLE-3 drafter for a target: the target's own answers → a vocabulary → a drafter.

    python checkpoints/recipe/make_eagle3.py --target checkpoints/tiny/target --out checkpoints/tiny/eagle3 \
        --prompts checkpoints/tiny/prompts/train.jsonl --held_out checkpoints/tiny/prompts/dev.jsonl \
        --draft_vocab 1024 --intermediate 256 --layers 1 5 8

The drafter learns the target's distribution at each position of an answer, unrolled over several steps as it will draft
(accept_head/eagle3/unroll.py). Answers and training checkpoints are kept in --work, so an interrupted run goes on. On a
CPU the target reads each answer once: what the drafter learns from is kept, too, about 2 × (layers + 1) × channels
bytes a token. There `--engine vllm` answers several times as fast as our loop, where vLLM is installed. If there are
too few prompts, `--own_prompts` lets the target write more, provided that it is a chat model (own_text.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# On a CPU oneDNN keeps what it compiles for each shape. Nearly every batch has one of its own.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "400")

import lightning as L
import torch
from language_model import quick_bf16
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from own_text import Answer, answers, own_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import LlamaConfig, PreTrainedModel, get_cosine_schedule_with_warmup

from accept_head.eagle3.network import Eagle3Drafter
from accept_head.eagle3.saved import save_eagle3
from accept_head.eagle3.unroll import unroll
from accept_head.files import atomic_path, sha256
from accept_head.inference.engine.call import states_of
from accept_head.pair import load_model

DECAY = 0.8  # of a step's weight in the loss, as in EAGLE-3's code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--own_prompts", type=int, default=0, help="and so many that the target, a chat model, writes")
    parser.add_argument("--held_out", required=True, help="prompts whose answers are not trained on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="answers, states, checkpoints, logs; OUT/work when left out")
    parser.add_argument(
        "--temperatures", nargs="+", type=float, default=[1, 1, 1, 0], help="one pass over the prompts each"
    )
    parser.add_argument("--new_tokens", type=int, default=96)
    parser.add_argument("--layers", nargs=3, type=int, required=True, help="of the target, before which it is read")
    parser.add_argument("--draft_vocab", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, help="channels of the drafter's MLP; the target's when left out")
    parser.add_argument("--steps", type=int, default=5, help="that a round is unrolled")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch_tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=4e-3, help="of Muon; AdamW's is half of it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--engine", choices=("loop", "vllm"), default="loop", help="that answers")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; each trains in a process of its own")
    options = parser.parse_args()
    work = options.work or options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    passes = len(options.temperatures)
    files = {"train": options.prompts}
    if options.own_prompts:
        files["own"] = own_prompts(options, work / "own_prompts.jsonl", options.own_prompts, passes + 1)
    train = [
        answer
        for seed, temperature in enumerate(options.temperatures)
        for name, prompts in files.items()
        for answer in answers(options, prompts, work / f"{name}{seed}.jsonl", temperature, seed, options.new_tokens)
    ]
    held_out = answers(options, options.held_out, work / "held_out.jsonl", 1.0, passes, options.new_tokens)
    target = load_model(options.target, "--target", dtype=options.dtype)
    L.seed_everything(0)
    drafter = new_drafter(target, options)
    drafter.set_vocabulary(most_frequent(train, options.draft_vocab, drafter.output_size))
    begin_as(drafter, target)
    if fit(drafter, target, train, held_out, options, work).is_global_zero:
        save_eagle3(drafter.to(torch.bfloat16), options.out)


# --- text ------------------------------------------------------------------------------------------------------------


def most_frequent(texts: list[Answer], count: int, vocabulary: int) -> Tensor:
    """The ids that answers have most often, ascending."""
    counts = Counter(token for _, answer in texts for token in answer)
    return torch.tensor(sorted(sorted(range(vocabulary), key=lambda token: (-counts[token], token))[:count]))


def batches(texts: list[Answer], batch_tokens: int) -> list[list[Answer]]:
    """Texts of about the same length together, in a random order."""
    by_length = sorted(texts, key=lambda text: len(text[0]) + len(text[1]))
    found: list[list[Answer]] = [[]]
    for text in by_length:
        if found[-1] and (len(found[-1]) + 1) * (len(text[0]) + len(text[1])) > batch_tokens:
            found.append([])
        found[-1].append(text)
    return [found[place] for place in torch.randperm(len(found)).tolist()]


# --- what the target says -------------------------------------------------------------------------------------------


class TargetOutputs(Dataset[dict[str, Tensor]]):
    """What the target has computed at each text of a batch. On a CPU it is read from files, which are made when they
    are first wanted; a GPU computes it again as fast as a disk would give it.

    Slot t takes x_{t+1} and predicts x_{t+2}, whose distribution the target gives at t + 1. ids: (batch, slots), x_1, …
    states: (batch, slots, layers × hidden), the target's at x_0, … counts: (batch, slots) bool, whether x_{t+2} is of
    an answer. last: (those, hidden), the target's last state at t + 1, and log_norm: (those,), the logarithm of the sum
    of its exponentiated logits.
    """

    def __init__(self, batches: list[list[Answer]], target: PreTrainedModel, layers: tuple[int, ...], folder: Path):
        self.batches, self.target, self.folder = batches, target, folder
        self.reads, self.source = states_of(target, layers), [target.name_or_path, str(target.dtype), layers]
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if self.target.device.type == "cuda":
            return self.read(self.batches[number])
        path = self.folder / f"{sha256(json.dumps([self.source, self.batches[number]]))[:16]}.safetensors"
        if not path.is_file():
            with atomic_path(path) as unfinished:
                save_file(self.read(self.batches[number]), unfinished)
        return load_file(path)

    @torch.no_grad()
    def read(self, texts: list[Answer]) -> dict[str, Tensor]:
        ids = pad_sequence([torch.tensor(prompt + answer) for prompt, answer in texts], batch_first=True)
        of_answer = [torch.tensor([0] * len(prompt) + [1] * len(answer)) for prompt, answer in texts]
        counts = torch.nn.functional.pad(pad_sequence(of_answer, batch_first=True).bool()[:, 2:], (0, 1))
        ids, counts = ids.to(self.target.device), counts.to(self.target.device)
        self.reads.wanted = True
        last = self.target.get_decoder()(ids).last_hidden_state[:, 1:][counts]
        self.reads.wanted = False
        states = self.reads.last[:, :-1].contiguous()
        del self.reads.last
        log_norm = self.target.get_output_embeddings()(last).float().logsumexp(-1)
        return {"ids": ids[:, 1:].contiguous(), "states": states, "counts": counts, "last": last, "log_norm": log_norm}


# --- training --------------------------------------------------------------------------------------------------------


class Order(Sampler[int]):
    """Each pass reads all batches in an order of its own. A run that goes on does so where the last one stopped."""

    def __init__(self, batches: int, processes: int, rounds_done: int):
        """rounds_done: of one batch a process, over all passes."""
        self.batches, self.processes, self.rounds_done = batches, processes, rounds_done

    def __len__(self) -> int:
        """Rounds of a pass. The first batches fill its last one."""
        return math.ceil(self.batches / self.processes)

    def __iter__(self) -> Iterator[int]:
        rank = torch.distributed.get_rank() if self.processes > 1 else 0
        passes, begun = divmod(self.rounds_done, len(self))
        order = torch.randperm(self.batches, generator=torch.Generator().manual_seed(passes)).tolist()
        self.rounds_done = (passes + 1) * len(self)
        places = range(rank + begun * self.processes, len(self) * self.processes, self.processes)
        return iter([order[place % self.batches] for place in places])


def new_drafter(target: PreTrainedModel, options: argparse.Namespace) -> Eagle3Drafter:
    wide = target.config
    config = LlamaConfig(
        vocab_size=wide.vocab_size,
        draft_vocab_size=options.draft_vocab,
        hidden_size=wide.hidden_size,
        intermediate_size=options.intermediate or wide.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=wide.num_attention_heads,
        num_key_value_heads=wide.num_key_value_heads,
        max_position_embeddings=wide.max_position_embeddings,
        rms_norm_eps=wide.rms_norm_eps,
        rope_parameters=wide.rope_parameters,
        bos_token_id=wide.bos_token_id,
        eos_token_id=wide.eos_token_id,
        pad_token_id=wide.pad_token_id,
        eagle_config={"eagle_aux_hidden_state_layer_ids": options.layers},
    )
    return Eagle3Drafter(config)


@torch.no_grad()
def begin_as(drafter: Eagle3Drafter, target: PreTrainedModel) -> None:
    """The drafter has the target's embeddings for good. It begins with the target's norm and rows at the end."""
    body = target.get_decoder()
    drafter.model.embed_tokens.weight.copy_(body.embed_tokens.weight).requires_grad_(False)
    drafter.model.norm.weight.copy_(body.norm.weight)
    drafter.lm_head.weight.copy_(target.get_output_embeddings().weight[drafter.t2d])


@torch.compile(dynamic=True)
def cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """Of the drafter's distribution against the target's, p; both (positions, draft vocabulary)."""
    return -(p * logits.float().log_softmax(-1)).sum(-1).mean()


@torch.compile(dynamic=True)
def surprise_at_acceptance(logits: Tensor, p: Tensor) -> Tensor:
    """− log of the chance that a drawn token is accepted (LK losses, arXiv:2602.23881). Shapes as above."""
    share = (logits.float().log_softmax(-1) - p.log()).clamp(max=0).exp()  # min(p, q) compiles to much slower code
    return -(p * share).sum(-1).clamp(min=1e-9).log().mean()


class Distilled(L.LightningModule):
    """At each step of a round from every position of an answer, the drafter learns the target's distribution: first by
    its cross-entropy, and in the second half by the chance of acceptance itself.

    Matrices learn by Muon, which needs fewer steps; the rows at the end and the norms by AdamW.
    """

    def __init__(self, drafter: Eagle3Drafter, target: PreTrainedModel, *, steps: int, lr: float, total_steps: int):
        super().__init__()
        self.automatic_optimization = False  # Lightning's own has one optimizer
        self.drafter, self.steps, self.lr, self.total_steps = drafter, steps, lr, total_steps
        rows: Any = target.get_output_embeddings()
        self.rows = [rows.weight.detach()[drafter.t2d]]  # a list: not in checkpoints

    def losses(self, batch: dict[str, Tensor], loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """One a step. batch: as of TargetOutputs."""
        counts, before = batch["counts"], self.steps - 1  # rounds that begin in a prompt reach into its answer
        first = (counts.int().argmax(1) - before).clamp(min=0)
        longest = before + int(counts.sum(1).max())
        asked = (first[:, None] + torch.arange(longest, device=first.device)).clamp(max=counts.shape[1] - 1)
        begun = counts.take_along_dim(asked, dim=1)
        begun[:, :before] = False  # a prompt so short that its first rounds would begin before it
        taken = torch.zeros_like(counts).scatter_(1, asked, begun)[counts]
        with torch.no_grad():
            logits = torch.nn.functional.linear(batch["last"][taken], self.rows[0]).float()
            p = (logits - batch["log_norm"][taken, None]).exp()
        states = self.drafter.project(batch["states"].float())
        unrolled = unroll(self.drafter, batch["ids"], states, self.steps, asked)
        return [loss(self.drafter.lm_head(step.hidden[begun]), p) for step in unrolled]

    def training_step(self, batch: dict[str, Tensor], _: int) -> None:
        begins = self.global_step < self.total_steps  # which counts both optimizers' steps
        losses = self.losses(batch, cross_entropy if begins else surprise_at_acceptance)
        weights = [DECAY**number for number in range(self.steps)]
        loss = sum(weight * each for weight, each in zip(weights, losses, strict=True)) / sum(weights)
        self.log("loss", loss, prog_bar=True, batch_size=1)
        self.manual_backward(loss)
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            self.clip_gradients(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        size = int(batch["counts"].sum())
        for name, loss in (("held_out", cross_entropy), ("accepted", surprise_at_acceptance)):
            for number, each in enumerate(self.losses(batch, loss)):
                self.log(f"{name}_{number}", each, prog_bar=not number, batch_size=size, sync_dist=True)

    def configure_optimizers(self) -> Any:
        matrices = [each.weight for each in self.drafter.model.modules() if isinstance(each, torch.nn.Linear)]
        others = [
            *self.drafter.lm_head.parameters(),
            *(each for each in self.drafter.model.parameters() if each.ndim == 1),
        ]
        optimizers = [
            torch.optim.Muon(matrices, lr=self.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=self.lr / 2, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        return optimizers, [
            get_cosine_schedule_with_warmup(each, self.total_steps // 50 + 1, self.total_steps) for each in optimizers
        ]


def fit(
    drafter: Eagle3Drafter,
    target: PreTrainedModel,
    train: list[Answer],
    held_out: list[Answer],
    options: argparse.Namespace,
    work: Path,
) -> L.Trainer:
    """Train, resuming from `work/last.ckpt` when it is there. Of a CPU each thread trains in a process of its own, as
    two threads are hardly faster than one at operations as small as these."""
    processes = 1 if torch.cuda.is_available() else options.threads
    torch.set_num_threads(1)
    steps, dev = (
        TargetOutputs(batches(texts, options.batch_tokens), target, drafter.layers_read, work / "states")
        for texts in (train, held_out)
    )
    total = options.epochs * math.ceil(len(steps) / processes)
    module = Distilled(drafter, target, steps=options.steps, lr=options.lr, total_steps=total)
    trainer = L.Trainer(
        max_epochs=options.epochs,
        precision="bf16-mixed" if quick_bf16() else "32-true",
        accelerator="auto",
        devices=processes,
        logger=CSVLogger(work, name="log", version=""),
        log_every_n_steps=20,
        # Both optimizers' steps count. By time Lightning saves nothing where optimization is manual.
        callbacks=[ModelCheckpoint(work, save_last=True, save_top_k=0, every_n_train_steps=100)],
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    last = work / "last.ckpt"
    done = torch.load(last, mmap=True, weights_only=True)["global_step"] // 2 if last.exists() else 0
    trainer.fit(
        module,
        DataLoader(steps, batch_size=None, sampler=Order(len(steps), processes, done)),
        DataLoader(dev, batch_size=None),
        ckpt_path=str(last) if last.exists() else None,
    )
    trainer.save_checkpoint(last)
    return trainer


if __name__ == "__main__":
    main()
