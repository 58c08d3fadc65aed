"""The named recipes: the paper's has the paper's settings, and wrong settings are refused by name."""

from __future__ import annotations

import inspect

import pytest

from accept_head import HeadConfig, InputError
from accept_head.training.learn.recipe import RECIPES, Recipe, variants
from accept_head.training.learn.verb import train


def test_specdecpp_has_the_papers_settings():
    """SpecDec++ §4.4, §5 and its published head; docs/theory.md §4."""
    recipe = RECIPES["specdecpp"]
    assert recipe.depth == 3
    assert recipe.predicts == "token"
    assert (recipe.w_acc, recipe.w_rej) == (1, 6)
    assert (recipe.packing, recipe.r) == ("mixing", 0.15)
    assert (recipe.epochs, recipe.batch_size, recipe.warmup_share) == (3, 32, 0.03)
    assert not recipe.signals, "the paper's head reads the hidden state only"


def test_default_feeds_no_wrong_prefix_and_weighs_both_outcomes_alike():
    recipe = RECIPES["default"]
    assert recipe.packing == "prefix" and recipe.signals and recipe.embedding, "what docs/log.md recommends"
    assert (recipe.w_acc, recipe.w_rej) == (1, 1)


def test_alternatives_are_all_that_there_are_and_none_where_the_drawn_token_is_fed():
    recipe = RECIPES["default"]
    assert recipe.for_alternatives(4).alternatives == 4 and recipe.for_alternatives(0).alternatives == 0
    assert recipe.override(alternatives=2).for_alternatives(4).alternatives == 2
    assert recipe.override(packing="exact").for_alternatives(4).alternatives == 0
    assert recipe.override(predicts="next").for_alternatives(4).alternatives == 0
    assert RECIPES["specdecpp"].for_alternatives(4).alternatives == 0, "not in the paper"
    with pytest.raises(InputError, match="alternatives is 5, but the traces have 4"):
        recipe.override(alternatives=5).for_alternatives(4)


@pytest.mark.parametrize("change", [{"packing": "exact"}, {"packing": "mixing"}, {"predicts": "next"}], ids=str)
def test_alternatives_are_refused_where_a_head_cannot_learn_of_them(change):
    with pytest.raises(
        InputError, match=r"^alternatives is 4, but only a head that predicts token or both, with prefix"
    ):
        RECIPES["default"].override(alternatives=4, **change)


def test_override_replaces_what_is_given_and_nothing_else():
    changed = RECIPES["specdecpp"].override(depth=0, r=0.0, w_rej=None, lr=5e-4)
    assert changed == Recipe(depth=0, r=0.0, w_rej=6.0, lr=5e-4)
    assert RECIPES["specdecpp"] == Recipe(w_rej=6.0), "a recipe was changed in place"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("w_acc", 0),
        ("w_acc", -1.0),
        ("w_rej", 0.0),
        ("w_rej", float("inf")),
        ("w_rej", float("nan")),
        ("lr", 0.0),
        ("lr", -1e-3),
        ("lr", float("nan")),
        ("epochs", 0),
        ("batch_size", 0),
        ("batch_size", -32),
        ("r", -0.1),
        ("r", 1.1),
        ("r", float("nan")),
        ("warmup_share", 1.5),
        ("alternatives", -1),
    ],
)
def test_an_impossible_value_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=rf"^{name} is {value}"):
        RECIPES["default"].override(**{name: value})


def test_learning_rate_of_more_channels_is_smaller_in_proportion():
    """Of those that the state goes in with: the draft's own, or, standardised, its components."""
    recipe = RECIPES["specdecpp"].override(width=64)
    assert recipe.for_hidden_size(128) == recipe
    assert recipe.for_hidden_size(1024).lr == pytest.approx(recipe.lr / 8)
    assert recipe.for_hidden_size(1024).override(lr=recipe.lr) == recipe
    for components in (64, 256):
        recipe = RECIPES["default"].override(width=components)
        assert recipe.for_hidden_size(1024).lr == pytest.approx(recipe.lr * 128 / components)
        assert recipe.for_hidden_size(1024).override(lr=recipe.lr) == recipe


@pytest.mark.parametrize(
    ("traces", "processes", "fitting"), [(100, 1, 16), (16, 4, 16), (10, 1, 10), (10, 4, 8), (3, 2, 2), (1, 2, 2)]
)
def test_batch_is_cut_to_the_traces_in_equal_parts(traces, processes, fitting):
    assert Recipe(batch_size=16).for_traces(traces, processes) == Recipe(batch_size=fitting)


@pytest.mark.parametrize(
    ("traces", "processes", "batch"),
    # An 800th, as a power of two a process, from 4 to 32, but never more than there are, and one a process at least.
    [(480, 1, 4), (6400, 1, 8), (9000, 1, 8), (10**6, 1, 32), (10**6, 8, 32), (10**6, 3, 24), (3, 1, 2), (480, 8, 8)],
)
def test_auto_batch_follows_the_number_of_traces(traces, processes, batch):
    assert Recipe(batch_size="auto").for_traces(traces, processes) == Recipe(batch_size=batch)


def test_auto_width_is_the_drafts_up_to_a_bound():
    recipe = Recipe(width="auto")
    assert [recipe.for_hidden_size(size).width for size in (128, 1024, 4096)] == [None, None, 1024]
    assert [RECIPES["default"].for_hidden_size(size).width for size in (64, 128, 4096)] == [64, 128, 128]


def test_every_recipe_is_a_possible_head():
    for recipe in RECIPES.values():
        HeadConfig(hidden_size=8, depth=recipe.depth, predicts=recipe.predicts)


def test_every_setting_of_a_recipe_is_an_option_of_train_that_defaults_to_the_recipe():
    options = inspect.signature(train).parameters
    for name in vars(RECIPES["default"]):
        if name not in ("base", "residual"):  # what a recipe is
            assert options[name].default is None


def test_single_values_are_one_head_without_a_name():
    recipe = RECIPES["specdecpp"]
    assert variants(recipe, None, None) == {"": recipe}
    assert variants(recipe, 1, 3.0) == {"": recipe.override(depth=1, w_rej=3.0)}


def test_lists_are_every_combination_by_name():
    recipe = RECIPES["specdecpp"]
    heads = variants(recipe, [0, 4], [1.0, 0.5, 12.0])
    assert list(heads) == [f"depth{depth}-w_rej{weight}" for depth in (0, 4) for weight in ("1", "0.5", "12")]
    assert heads["depth4-w_rej0.5"] == recipe.override(depth=4, w_rej=0.5)
    assert list(variants(recipe, [2], None)) == ["depth2-w_rej6"]
    assert list(variants(recipe, None, [1.0])) == ["depth3-w_rej1"]


def test_close_weights_keep_names_of_their_own():
    assert len(variants(RECIPES["default"], None, [1.0, 1.00000001])) == 2
