"""Pairs of tiny random models: hidden states, vocabularies, fingerprints, and the errors of load_pair."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from accept_head.checkpoint import checkpoint_fingerprint
from accept_head.errors import InputError
from accept_head.pair import (
    attention_mask_for,
    base_model,
    check_same_vocabulary,
    context_tokens,
    hidden_size,
    load_model,
    load_pair,
    load_tokenizer,
    output_size,
    vocabulary_fingerprint,
)

VOCAB = 64
HIDDEN = 16
WORDS = {"<unk>": 0, "</s>": 1, **{f"w{index}": index for index in range(2, VOCAB)}}

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # large enough that final norm and soft-capping change the numbers visibly
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**COMMON, num_key_value_heads=1),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=2, n_positions=128, initializer_range=0.4, bos_token_id=1
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**COMMON),
    "gemma2": lambda: Gemma2Config(**COMMON, num_key_value_heads=1, head_dim=8, final_logit_softcapping=2.0),
    "qwen3": lambda: Qwen3Config(**COMMON, num_key_value_heads=1, head_dim=8),
}


def build_model(name="llama", seed=0, **changes):
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    return AutoModelForCausalLM.from_config(config).eval()


def build_tokenizer(words=WORDS):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(dict(words), unk_token="<unk>")), unk_token="<unk>", eos_token="</s>"
    )


def save(folder, *, words=WORDS, dtype=torch.float32, **model_options):
    build_model(**model_options).to(dtype).save_pretrained(folder)
    build_tokenizer(words).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return save(root / "target", seed=0), save(root / "draft", seed=1)


# --- hidden states

IDS = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_the_hidden_state_is_the_input_of_the_language_model_head(name):
    model, seen = build_model(name), []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    model(input_ids=IDS)
    handle.remove()
    assert torch.equal(base_model(model)(input_ids=IDS)[0], seen[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_language_model_head(name):
    model = build_model(name)
    assert (output_size(model), hidden_size(model), context_tokens(model)) == (VOCAB, HIDDEN, 128)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3"])
@torch.no_grad()
def test_an_explicit_causal_mask_changes_nothing_and_a_narrower_one_does(name, implementation):
    model = build_model(name)
    model.set_attn_implementation(implementation)
    causal = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 1, 7, 7)
    plain = model(input_ids=IDS).logits
    masked = model(input_ids=IDS, attention_mask=attention_mask_for(model, causal)).logits
    assert torch.allclose(masked, plain, atol=1e-4)
    blind = causal.clone()
    blind[..., 6, 2] = False  # the last token does not see the third
    changed = model(input_ids=IDS, attention_mask=attention_mask_for(model, blind)).logits
    assert torch.allclose(changed[:, :6], plain[:, :6], atol=1e-4)
    assert not torch.allclose(changed[:, 6], plain[:, 6], atol=1e-2)


def test_attention_that_takes_no_mask_is_refused():
    model = build_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flash_attention_2"):
        attention_mask_for(model, torch.ones(1, 1, 2, 2, dtype=torch.bool))


# --- vocabularies


def renumbered(words=WORDS, first="w5", second="w9"):
    return {**words, first: words[second], second: words[first]}


def test_equal_vocabularies_pass():
    check_same_vocabulary(build_tokenizer(), build_tokenizer(dict(reversed(WORDS.items()))))


def test_a_vocabulary_of_the_same_size_with_other_numbers_is_refused_by_token():
    with pytest.raises(InputError, match=r"token 'w5' is id 5 for the target and id 9 for the draft"):
        check_same_vocabulary(build_tokenizer(), build_tokenizer(renumbered()))


def test_a_token_that_only_one_side_has_is_refused_by_name():
    longer = {**WORDS, "extra": VOCAB}
    with pytest.raises(InputError, match=r"token 'extra' is id None for the target and id 64"):
        check_same_vocabulary(build_tokenizer(), build_tokenizer(longer))


def test_a_vocabulary_fingerprint_depends_on_the_numbering_only():
    plain = vocabulary_fingerprint(build_tokenizer())
    assert plain == vocabulary_fingerprint(build_tokenizer(dict(reversed(WORDS.items()))))
    assert plain != vocabulary_fingerprint(build_tokenizer(renumbered()))
    assert plain != vocabulary_fingerprint(build_tokenizer({**WORDS, "extra": VOCAB}))


# --- fingerprints of checkpoints


def test_a_checkpoint_has_one_fingerprint_wherever_it_lies_and_however_it_is_sharded(tmp_path):
    model = build_model()
    folders = [tmp_path / name for name in ("one", "copy", "sharded")]
    for folder, size in zip(folders, ("5GB", "5GB", "8KB"), strict=True):
        model.save_pretrained(folder, max_shard_size=size)
    assert len(list(folders[2].glob("*.safetensors"))) > 1
    assert len({checkpoint_fingerprint(folder) for folder in folders}) == 1


def test_another_checkpoint_has_another_fingerprint(folders):
    target, draft = folders
    assert checkpoint_fingerprint(target) != checkpoint_fingerprint(draft)


def test_a_small_change_of_one_parameter_changes_the_fingerprint(tmp_path):
    model = build_model()
    model.save_pretrained(tmp_path / "before")
    model.model.layers[1].mlp.down_proj.weight.data *= 1.02
    model.save_pretrained(tmp_path / "after")
    assert checkpoint_fingerprint(tmp_path / "before") != checkpoint_fingerprint(tmp_path / "after")


def test_a_folder_without_safetensors_has_no_fingerprint(tmp_path):
    with pytest.raises(InputError, match="safetensors"):
        checkpoint_fingerprint(tmp_path)


# --- loading


def test_a_pair_is_ready_for_inference(folders):
    pair = load_pair(*folders, device="cpu")
    assert pair.vocab_size == VOCAB
    for model in (pair.target, pair.draft):
        assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
        assert model.device.type == "cpu" and model.dtype == torch.float32
    assert pair.tokenizer.padding_side == "left" and pair.tokenizer.pad_token_id == pair.tokenizer.eos_token_id
    assert torch.equal(pair.target.lm_head.weight, build_model(seed=0).lm_head.weight)
    assert torch.equal(pair.draft.lm_head.weight, build_model(seed=1).lm_head.weight)


def test_auto_is_float32_on_a_cpu_and_a_named_dtype_is_obeyed(tmp_path):
    folder = save(tmp_path / "m", dtype=torch.bfloat16)
    assert load_model(folder, "--draft", dtype="auto", device="cpu").dtype == torch.float32
    assert load_model(folder, "--draft", dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_the_vocabulary_is_what_both_models_score(tmp_path, folders):
    wider = save(tmp_path / "wider", vocab_size=VOCAB + 16)  # an embedding padded to a round number
    assert load_pair(wider, folders[1], device="cpu").vocab_size == VOCAB


def test_a_model_that_does_not_score_every_token_is_refused(tmp_path, folders):
    narrow = save(tmp_path / "narrow", vocab_size=VOCAB // 2)
    with pytest.raises(InputError, match=r"--target scores 64 ids and --draft 32"):
        load_pair(folders[0], narrow, device="cpu")


def test_a_draft_with_another_numbering_is_refused_before_any_weight_is_read(tmp_path, folders):
    other = save(tmp_path / "other", words=renumbered())
    (other / "model.safetensors").unlink()
    with pytest.raises(InputError, match="'w5'"):
        load_pair(folders[0], other, device="cpu")


def test_an_unknown_dtype_is_refused(folders):
    with pytest.raises(InputError, match="dtype is 'int8'"):
        load_pair(*folders, dtype="int8", device="cpu")


@pytest.mark.parametrize("missing", ["target", "draft"])
@pytest.mark.parametrize("name", ["/not/there", "not/there", "./not there"])
def test_a_model_that_is_not_there_is_refused_by_option(folders, missing, name):
    places = {"target": folders[0], "draft": folders[1], missing: name}
    with pytest.raises(InputError, match=f"--{missing} {name}"):
        load_pair(places["target"], places["draft"], device="cpu")


def test_a_folder_without_tokenizer_is_refused(tmp_path, folders):
    build_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(InputError, match=r"--draft .*tokenizer cannot be loaded"):
        load_pair(folders[0], tmp_path / "bare", device="cpu")


def test_a_damaged_tokenizer_is_refused(tmp_path):
    folder = save(tmp_path / "m")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(InputError, match=r"--target .*tokenizer cannot be loaded"):
        load_tokenizer(folder, "--target")


def test_weights_in_a_pickle_are_refused(tmp_path):
    folder = save(tmp_path / "m")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"--draft .*model\.safetensors"):
        load_model(folder, "--draft", device="cpu")


def rewritten(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def retensored(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


UP = "model.layers.0.mlp.up_proj.weight"
DAMAGE = {
    "config cut off": lambda folder: (folder / "config.json").write_text('{"cut'),
    "config is a list": lambda folder: (folder / "config.json").write_text("[]"),
    "unknown model": lambda folder: (folder / "config.json").write_text('{"model_type": "unheard-of"}'),
    "value of a wrong type": lambda folder: rewritten(
        folder / "config.json", lambda c: {**c, "hidden_size": "sixteen"}
    ),
    "empty weights": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "half of the weights": lambda folder: os.truncate(folder / "model.safetensors", 9000),
    "a tensor is missing": lambda folder: retensored(folder / "model.safetensors", lambda t: t.pop(UP)),
    "a tensor of another shape": lambda folder: retensored(
        folder / "model.safetensors", lambda t: t.update({UP: t[UP][:3].clone()})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused(tmp_path, damage):
    """A missing tensor would otherwise silently be a random one."""
    folder = save(tmp_path / "m")
    DAMAGE[damage](folder)
    with pytest.raises(InputError, match="--draft "):
        load_model(folder, "--draft", device="cpu")
