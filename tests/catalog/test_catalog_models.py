"""Model shapes: parameter counts by three roads, and every way an entry can contradict itself."""

from __future__ import annotations

import pytest

from pstar_sim.catalog.listing_rows import list_models
from pstar_sim.catalog.model_shapes import count_params, model_entry, model_names, read_models
from pstar_sim.errors import CatalogError, UnknownName


def test_count_is_that_of_the_shape() -> None:
    for m in map(model_entry, model_names()):
        assert count_params(m) == m.params, m.name
        assert m.head_dim * m.heads == m.hidden or m.own_head_dim or m.latent, m.name
        assert m.source, m.name


# Published totals, as the released checkpoints have them.
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("bert-base", 109_514_298),
        ("vit-b-16", 86_567_656),
    ],
)
def test_published_counts(name: str, params: int) -> None:
    assert model_entry(name).params == params


# Column N of the PatrickStar table, in billions: 12LH^2 + 13LH + (50257 + seq)H, to three decimals.
PATRICKSTAR = {
    "GPT2small": 0.757, "1B": 1.112, "megatron_1.3B": 1.314, "2B": 2.119, "megatron_3.9B": 2.020, "4B": 4.197,
    "6B": 6.162, "8B": 8.314, "10B": 10.279, "11B": 11.286, "12B": 12.293, "13B": 13.300, "15B": 15.918,
    "18B": 18.334, "NV_18B": 18.438, "NV_39B": 39.080, "NV_76B": 76.031, "DS_20B": 20.555, "DS_40B": 40.691,
    "DS_50B": 50.356, "DS_60B": 60.826, "DS_68B": 67.749, "175B": 174.6, "220B": 218.1, "250B": 248.9,
    "310B": 413.2, "454B": 454.1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PATRICKSTAR.items())
def test_patrickstar_table(name: str, billions: float) -> None:
    m = model_entry(name)
    column = 12 * m.layers * m.hidden**2 + 13 * m.layers * m.hidden + (50257 + m.max_seq) * m.hidden
    assert m.params == column + 2 * m.hidden, "the column leaves out the last LayerNorm"
    assert m.params / 1e9 == pytest.approx(billions, abs=0.00051 if billions < 100 else 0.051)


def test_gpt_count_by_hand() -> None:
    # tiny-gpt2: H 64, F 256. A block: q, k, v, o 4 x (64 x 64 + 64) = 16640; up 64 x 256 + 256 = 16640;
    # down 256 x 64 + 64 = 16448; two norms 256: 49984. Two blocks 99968; tokens and positions (256 + 128) x 64 = 24576;
    # last norm 128. Together 124672.
    assert model_entry("tiny-gpt2").params == 99968 + 24576 + 128 == 124672


def test_aliases_and_unknown_names() -> None:
    assert model_entry("20B") is model_entry("DS_20B")
    assert "20B" not in model_names()
    with pytest.raises(UnknownName, match="unknown model 'gpt2-xxl'; did you mean gpt2-xl"):
        model_entry("gpt2-xxl")


def test_sizes_up_to_175b_are_there() -> None:
    assert {"gpt-175b", "llama-3-70b", "llama-2-70b", "qwen2.5-72b", "15B", "18B", "bert-large", "vit-l-16"} <= set(
        model_names()
    )


def test_listing_has_a_row_for_each_model() -> None:
    rows = list_models()
    assert [row["model"] for row in rows] == list(model_names())
    assert len({tuple(row) for row in rows}) == 1
    assert next(row for row in rows if row["model"] == "15B")["billion parameters"] == 15.918


GOOD = """[m]
family = "gpt"
layers = 2
hidden = 64
heads = 4
kv_heads = 4
ffn = 256
vocab = 256
max_seq = 128
tied = true
params = 124_672
source = "a test"
checked = 2026-11-21
"""


def test_a_good_entry() -> None:
    assert read_models("m.toml", GOOD)["m"].params == 124672


@pytest.mark.parametrize(
    ("field", "line"),
    [
        *[(line.split(" = ")[0], "") for line in GOOD.splitlines()[1:]],  # each left out
        ("family", 'family = "rnn"'),
        ("layers", "layers = 0"),
        ("layers", "layers = 2.0"),
        ("hidden", "hidden = -64"),
        ("heads", "heads = 5"),
        ("kv_heads", "kv_heads = 2"),  # a GPT has as many as heads
        ("ffn", "ffn = 1e3"),
        ("vocab", "vocab = 0"),
        ("vocab", "vocab = true"),
        ("max_seq", "max_seq = 0"),
        ("tied", "tied = 1"),
        ("params", "params = 124_673"),
        ("params", "params = 1e30"),
        ("source", 'source = " "'),
        ("checked", "checked = 2026"),
        ("attention_bias", "tied = true\nattention_bias = true"),
        ("patch", "tied = true\npatch = 16"),
        ("colour", "tied = true\ncolour = 1"),
        ("window", "tied = true\nwindow = 16"),
        ("experts", "tied = true\nexperts = { count = 8, per_token = 2, ffn = 64 }"),
    ],
)
def test_a_bad_entry(field: str, line: str) -> None:
    target = "tied" if field in {"attention_bias", "patch", "colour", "window", "experts"} else field
    text = "\n".join(line if x.startswith(f"{target} =") else x for x in GOOD.splitlines())
    with pytest.raises(CatalogError, match=rf"m\.toml: \[m\] {field}( is missing| = .*(; must be|not a known))"):
        read_models("m.toml", text)


def test_a_bad_vit() -> None:
    vit = (
        GOOD.replace('"gpt"', '"vit"').replace("vocab = 256", "vocab = 0").replace("max_seq = 128", "max_seq = 5")
        + "patch = 16\nimage = 32\nclasses = 10\n"
    )
    for old, new, field in (
        ("max_seq = 5", "max_seq = 4", "max_seq"),  # 2 x 2 patches and the class token
        ("image = 32", "image = 33", "patch"),
        ("classes = 10\n", "", "patch"),
        ("vocab = 0", "vocab = 10", "vocab"),
    ):
        with pytest.raises(CatalogError, match=rf"\[m\] {field} = "):
            read_models("m.toml", vit.replace(old, new))


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("full_every = 6", "full_every"),
        ("experts = { count = 4, per_token = 8, ffn = 64 }", "per_token"),
        ("experts = { count = 8, per_token = 2, ffn = 64, dense_layers = 2 }", "dense_layers"),
        ("head_dim = 32\nlatent = { q_rank = 8, kv_rank = 8, rotary = 4, plain = 4, value = 4 }", "head_dim"),
    ],
)
def test_details_that_do_not_go_together(line: str, field: str) -> None:
    with pytest.raises(CatalogError, match=rf"{field} = .*; must be"):
        read_models("m.toml", GOOD.replace('"gpt"', '"llama"') + line + "\n")


def test_a_name_used_twice() -> None:
    with pytest.raises(CatalogError, match="'m' is taken already"):
        read_models("m.toml", GOOD + 'aliases = ["m"]\n')
