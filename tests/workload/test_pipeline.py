"""The order of a stage's cells, and what crosses its borders, on parts of presets and of a chain worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from pstar_sim.catalog.attention import needed_flops
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.core.layout import build_layout
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.workload.orders import Order
from pstar_sim.workload.parallelism import Parallelism, pipeline, replica, split
from pstar_sim.workload.parallelism import stage as stage_part
from pstar_sim.workload.pipeline import cells_of, in_flight, in_schedule
from pstar_sim.workload.presets import stage_of, workload_of
from pstar_sim.workload.presets.shared import Stage
from pstar_sim.workload.workload import Workload


def words(schedule: str, stage: int, stages: int, micro_batches: int) -> str:
    cells = cells_of(schedule, stages, micro_batches)[stage]
    return " ".join(f"{'FB'[cell.backward]}{cell.micro_batch}" for cell in cells)


def stage(
    model: str, number: int, stages: int, micro_batches: int, *, schedule: str = "1f1b", **axes: bool
) -> Workload:
    """A stage of a model whose blocks the stages divide, of two sequences of 64 tokens, or images."""
    entry = model_entry(model)
    tokens = 64 if entry.takes(64) else entry.max_seq
    each = entry.layers // stages
    part = Stage(layers=range(number * each, (number + 1) * each), first=number == 0, last=number == stages - 1)
    one, crossings = stage_of(entry, part, batch=2, sequence=tokens, **axes)
    return in_schedule([(one, crossings)], cells_of(schedule, stages, micro_batches), number)


def test_1f1b_runs_so_many_forward_passes_ahead_as_stages_are_behind() -> None:
    assert words("1f1b", 0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words("1f1b", 1, 3, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words("1f1b", 2, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert words("1f1b", 0, 8, 2) == "F0 F1 B0 B1"


def test_gpipe_runs_all_forward_passes_first() -> None:
    assert words("gpipe", 1, 2, 3) == "F0 F1 F2 B0 B1 B2"
    with pytest.raises(ModelError, match="schedule is 'zb'; it is one of 1f1b, gpipe, interleaved"):
        cells_of("zb", 2, 4)


def test_interleaved_stages_run_their_parts_in_groups_of_micro_batches() -> None:
    """Stage r of p with v parts runs 2 (p - r - 1) + (v - 1) p passes ahead; the first holds p + (p - 1) / v stages'
    micro-batches at most."""
    first, last = cells_of("interleaved", 2, 4, 2)
    said = [" ".join(f"{'FB'[c.backward]}{c.micro_batch}{'ab'[c.part]}" for c in cells) for cells in (first, last)]
    assert said[0] == "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"
    assert said[1] == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"
    for p, v in ((2, 2), (4, 3), (8, 2)):
        cells = cells_of("interleaved", p, 2 * p, v)
        assert [in_flight(each) for each in cells] == [2 * (p - r - 1) + (v - 1) * p + 1 for r in range(p)]
        assert in_flight(cells[0]) / v == p + (p - 1) / v
    with pytest.raises(ModelError, match="6 micro-batches are no multiple of 4 stages; 8 would be"):
        cells_of("interleaved", 4, 6, 2)


def test_parts_of_interleaved_stages_send_round_the_ring() -> None:
    """The last stage's first part sends to the first stage's second; no chunk is of two parts."""
    entry, parts = model_entry("gpt2"), []
    for n in range(4):
        part = Stage(layers=range(3 * n, 3 * n + 3), first=n == 0, last=n == 3)
        parts.append(stage_of(entry, part, batch=2, sequence=64))
    cells = cells_of("interleaved", 2, 4, 2)
    stages = [in_schedule(parts[r::2], cells, r) for r in range(2)]
    ends: list[set[Any]] = [set(), set()]
    for r, w in enumerate(stages):
        for b in w.borders:
            ends[b.receives].add(
                (b.part, b.what, b.micro_batch, b.bytes, *((b.peer, r) if b.receives else (r, b.peer)))
            )
    assert ends[0] == ends[1] and len(ends[0]) == 3 * 2 * 4 + 2  # three borders, both ways; the tied table
    assert {(part, sender) for part, what, _, _, sender, _ in ends[0] if what == "activations"} == {
        (0, 0),
        (1, 1),
        (2, 0),
    }
    for w in stages:
        for chunk in build_layout(w).chunks:
            blocks = [
                int(w.tensors[s.tensor].name.split(".")[2]) for s in chunk.slots if ".h." in w.tensors[s.tensor].name
            ]
            assert len({block // 3 for block in blocks}) <= 1


@pytest.mark.parametrize("model", ["gpt2", "tiny-gpt2", "llama-3.2-1b", "llama-2-7b", "bert-base", "vit-b-16"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_parts_are_the_model(model: str, checkpointing: bool) -> None:
    """Each block, table and flop is in one stage, and each stage ends with the bytes with which it began."""
    tokens = 197 if model == "vit-b-16" else 64
    whole = workload_of(model_entry(model), batch=2, sequence=tokens, checkpointing=checkpointing)
    parts = [stage(model, r, 2, 1, checkpointing=checkpointing) for r in range(2)]
    names = [t.name for w in parts for t in w.tensors if t.tied_to is None]
    assert sorted(names) == sorted(t.name for t in whole.tensors if t.tied_to is None)
    assert sum(w.flops for w in parts) == whole.flops
    assert [w.moments[0].start_bytes - w.moments[-1].end_bytes for w in parts] == [0, 0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_one_stage_sends_another_receives(schedule: str) -> None:
    stages = [stage("gpt2", r, 3, 4, schedule=schedule) for r in range(3)]
    sent, received = (
        {
            (r, b.peer, b.what, b.micro_batch, b.bytes)
            for r, w in enumerate(stages)
            for b in w.borders
            if b.receives is receives
        }
        for receives in (False, True)
    )
    assert {(peer, r, *rest) for r, peer, *rest in sent} == received
    u = 2 * 64 * 768 * 2  # sequences, tokens, hidden, bytes of bf16
    assert {b.bytes for w in stages for b in w.borders if b.what in ("activations", "gradients")} == {u}
    assert len(sent) == 2 * 2 * 4 + 2  # two borders, both ways, four micro-batches; the tied table once each way


@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_that_split_layers_send_slices(*, sequence: bool) -> None:
    """Of two ranks each sends a half: with sequence parallelism its own tokens, else a slice, which those that receive
    gather in the moment that needs the whole."""
    u, parts = 2 * 64 * 768 * 2, []  # sequences, tokens, hidden, bytes of bf16
    for number in range(2):
        layers = range(6 * number, 6 * number + 6)
        part = Stage(layers=layers, first=number == 0, last=number == 1, tensor=2, sequence=sequence)
        one, crossings = stage_of(model_entry("gpt2"), part, batch=2, sequence=64)
        crossed = [c for c in crossings if c.turn == "each"]
        assert [c.bytes for c in crossed] == [u // 2] * 2
        for arrival in (c for c in crossed if c.receives):
            gathered = one.moments[arrival.moment + 1].collectives[:1]
            assert (gathered == (("all_gather", "tensor", u),)) or sequence
        assert one.moments[0].start_bytes == one.moments[-1].end_bytes
        parts.append(in_schedule([(one, crossings)], cells_of("1f1b", 2, 2), number))
    ends = [{b.bytes for b in w.borders if b.what in ("activations", "gradients")} for w in parts]
    assert ends == [{u // 2}] * 2


def test_1f1b_holds_the_activations_of_the_stages_behind_and_gpipe_those_of_all_micro_batches() -> None:
    """Blocks that keep their activations: beside each other, two stages differ by what the micro-batches in flight
    keep."""
    kept = {
        (schedule, m): stage("llama-2-7b", 0, 2, m, schedule=schedule, checkpointing=False).peak_non_model_bytes
        for schedule in ("1f1b", "gpipe")
        for m in (2, 3, 4, 5)
    }
    batch = 2 * 64 * 8  # token numbers of a micro-batch that waits
    assert [kept["1f1b", m + 1] - kept["1f1b", m] for m in (3, 4)] == [batch] * 2
    grown = kept["gpipe", 3] - kept["gpipe", 2]
    assert grown == kept["gpipe", 4] - kept["gpipe", 3] > 0


def test_a_table_that_embedding_and_head_share_is_the_first_stages() -> None:
    """GPT-2's has 50,257 x 768 elements, 2 bytes each as weights and 4 as a sum of gradients."""
    first, middle, last = (stage("gpt2", r, 3, 4) for r in range(3))
    assert "lm_head.weight" not in [t.name for t in last.tensors]
    once = [[b for b in w.borders if b.what.startswith("tied")] for w in (first, middle, last)]
    assert [[(b.what, b.receives, b.micro_batch, b.bytes) for b in borders] for borders in once] == [
        [("tied weights", False, 0, 50257 * 768 * 2), ("tied gradients", True, 3, 50257 * 768 * 4)],
        [],
        [("tied weights", True, 0, 50257 * 768 * 2), ("tied gradients", False, 3, 50257 * 768 * 4)],
    ]
    assert min(m.peak_bytes for m in last.moments) >= 50257 * 768 * 6
    assert [b.peer for b in once[0]] == [2, 2] and [b.peer for b in once[2]] == [0, 0]


def test_a_frozen_table_is_each_stages_own() -> None:
    entry = model_entry("gpt2")
    one, crossings = stage_of(entry, Stage(layers=range(6, 12), first=False), batch=2, sequence=64, lora=4)
    assert {c.what for c in crossings} == {"activations", "gradients"}
    assert [t.frozen for t in one.tensors if t.name == "lm_head.weight"] == [True]


class TestTensorParallel:
    """Ranks that split the heads, the feed-forward width and the vocabulary of llama-2-7b (32 layers of 4,096)."""

    def share(self, ranks: int, **axes: bool) -> Workload:
        part = Stage(layers=range(32), tensor=ranks)
        return stage_of(model_entry("llama-2-7b"), part, batch=2, sequence=64, **axes)[0]

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    def test_the_ranks_together_do_the_work_of_one(self, ranks: int) -> None:
        """All but the norms is split: 65 of them, of 4,096 elements."""
        whole, part = self.share(1), self.share(ranks)
        assert part.flops * ranks == whole.flops
        assert (part.params - 65 * 4096) * ranks == whole.params - 65 * 4096

    def test_the_sums_are_those_of_the_formula(self) -> None:
        """Of an activation u of the hidden size: two in forward, one in the recompute, which stops before the last
        product, and two in backward of each layer; one of the embedding and one of the head. The softmax sums three
        figures of each token."""
        u, tokens = 2 * 64 * 4096 * 2, 2 * 64
        sums = [size for m in self.share(4).moments for _, _, size in m.collectives]
        assert sums.count(u) == 32 * 5 + 2 and sums.count(4 * tokens) == 3 and len(sums) == 32 * 5 + 5
        kept = [size for m in self.share(4, checkpointing=False).moments for _, _, size in m.collectives]
        assert kept.count(u) == 32 * 4 + 2
        assert not any(m.collectives for m in self.share(1).moments)

    def test_a_part_of_the_activations_is_split(self) -> None:
        """What a layer keeps is a + b / t bytes."""
        one, two, four = (self.share(t, checkpointing=False).peak_non_model_bytes for t in (1, 2, 4))
        assert one - two == 2 * (two - four) > 0

    @pytest.mark.parametrize("model", ["gpt2-medium", "llama-2-7b", "gemma-3-4b"])
    @pytest.mark.parametrize("kernels", ["eager", "compiled"])
    @pytest.mark.parametrize("axes", [{}, {"checkpointing": False, "loss": "fused"}, {"loss": "chunked"}])
    def test_ranks_that_split_the_sequence_wait_for_the_same_bytes(
        self, model: str, kernels: str, axes: dict[str, Any]
    ) -> None:
        """Each sum of an activation becomes a gather before the products and a reduce-scatter after them. All that a
        stage begins with is there at its end."""
        one, split = (
            stage_of(
                model_entry(model), Stage(layers=range(2), tensor=2, sequence=sequence), batch=2, sequence=64,
                kernels=kernels, **axes,
            )[0]
            for sequence in (False, True)
        )  # fmt: skip
        assert split.moments[0].start_bytes == split.moments[-1].end_bytes
        assert split.flops == one.flops
        u = max(size for m in one.moments for _, _, size in m.collectives)
        sums = [what for m in one.moments for what, _, size in m.collectives if size == u]
        parts = [what for m in split.moments for what, _, size in m.collectives if size == u]
        assert parts.count("reduce_scatter") == len(sums) and "all_reduce" not in parts

    @pytest.mark.parametrize("kernels", ["eager", "compiled"])
    @pytest.mark.parametrize("axes", [{}, {"checkpointing": False}])
    def test_ranks_that_split_latent_attention_have_its_narrow_projections_whole(
        self, kernels: str, axes: dict[str, Any]
    ) -> None:
        """Of DeepSeek-V3, 1,536 of queries and 512 + 64 of keys and values: two ranks compute both for all tokens, or
        with sequence parallelism each for half of them. They sum gradients of what both read: narrow ones in each
        layer, and with sequence parallelism those of the projections at the end."""
        entry = model_entry("deepseek-v3")
        whole, part, split = (
            stage_of(
                entry, Stage(layers=range(2), tensor=t, sequence=sequence), batch=2, sequence=64, kernels=kernels,
                **axes,
            )[0]
            for t, sequence in ((1, False), (2, False), (2, True))
        )  # fmt: skip
        narrow, tokens = [1536, 512, 64], 2 * 64
        passes = 4 if not axes else 3  # a product's forward, recompute and two gradients
        doubled = 2 * 2 * passes * tokens * 7168 * sum(narrow)
        assert 2 * part.flops == whole.flops + doubled and 2 * split.flops == whole.flops
        shared = 2 * (7168 * sum(narrow) + 1536 + 512 + 2 * 7168) + 7168  # and the norms
        assert part.params == split.params == shared + (whole.params - shared) // 2
        ends = [w.moments[0].start_bytes - w.moments[-1].end_bytes for w in (whole, part, split)]
        assert ends == [0, 0, 0]
        summed, scattered = (Counter(row for m in w.moments for row in m.collectives) for w in (part, split))
        for width in narrow:
            assert summed["all_reduce", "tensor", tokens * width * 2] == 2
            assert scattered["reduce_scatter", "tensor", tokens * width * 2] == 2
            again = passes - 1 - (width == 64)  # keys that have a position are kept as gathered
            assert scattered["all_gather", "tensor", tokens * width * 2] == 2 * again
        assert scattered["all_reduce", "tensor", 2 * shared] == 1

    @pytest.mark.parametrize("model", ["gpt2-medium", "gpt2-xl"])
    def test_what_a_layer_keeps_is_korthikantis(self, model: str) -> None:
        """Table 2 of Korthikanti et al., 2022, of scores of 16 bits and masks of a byte: with t ranks, and with
        sequence parallelism; attention or all of it recomputed. Beside it each norm keeps two figures of 16 bits per
        token. Flash attention keeps a log-sum per query and head in place of scores and their mask."""
        entry, b, s = model_entry(model), 2, 64
        a, h = entry.heads, entry.hidden

        def kept(ranks: int, sequence: bool, **axes: Any) -> int:
            ends = []
            for layers in (1, 2):
                part = Stage(layers=range(layers), tensor=ranks, sequence=sequence)
                axes = {"kernels": "megatron", "checkpointing": False, "attention": "math", "dropout": 0.1} | axes
                w, _ = stage_of(entry, part, batch=b, sequence=s, **axes)
                assert w.moments[0].start_bytes == w.moments[-1].end_bytes
                ends.append(next(m.start_bytes for m in w.moments if m.name == "begin:transformer.ln_f"))
            return ends[1] - ends[0]

        all_of_it, scores = {"checkpointing": True}, {"recompute": "attention"}
        for t in (n for n in (1, 2, 4, 5, 8) if a % n == s % n == 0):
            norms = 2 * 2 * 2 * b * s
            assert kept(t, False) == s * b * h * (10 + 24 / t + 5 * a * s / (h * t)) + norms
            assert kept(t, False, **scores) == s * b * h * (10 + 24 / t) + norms
            assert kept(t, False, **all_of_it) == s * b * h * 2
            if t > 1:
                assert kept(t, True) == s * b * h / t * (34 + 5 * a * s / h) + norms / t
                assert kept(t, True, **scores) == s * b * h * 34 / t + norms / t
                assert kept(t, True, **all_of_it) == s * b * h * 2 / t
            flash, sums = {"attention": "flash"}, 4 * s * b * a / t
            assert kept(t, False, **flash) == s * b * h * (10 + 24 / t) + norms + sums
            assert kept(t, False, **flash, dropout=None) == s * b * h * (8 + 24 / t) + norms + sums
            assert kept(t, False, dropout="hidden=0.2") == s * b * h * (10 + 24 / t + 2 * a * s / (h * t)) + norms
            assert kept(t, False, dropout="attention=0.2") == s * b * h * (8 + 24 / t + 5 * a * s / (h * t)) + norms

    def test_a_first_stage_keeps_the_mask_of_its_embedding(self) -> None:
        """Of each hidden state; with sequence parallelism of a rank's part of the tokens."""
        for t, sequence in ((1, False), (2, False), (2, True)):
            part = Stage(layers=range(1), tensor=t, sequence=sequence)
            axes: dict[str, Any] = {"kernels": "megatron", "checkpointing": True}
            starts = []
            for rate in ("0", "0.1"):
                w, _ = stage_of(model_entry("gpt2"), part, batch=2, sequence=64, dropout=rate, **axes)
                starts.append(next(m.start_bytes for m in w.moments if m.name == "begin:transformer.h.0.ln_1"))
            assert starts[1] - starts[0] == 2 * 64 * 768 // (t if sequence else 1)

    @pytest.mark.parametrize("checkpointing", [True, False])
    @pytest.mark.parametrize("model", ["bert-base", "vit-b-16"])
    def test_encoders_are_split_as_decoders_are(self, model: str, checkpointing: bool) -> None:
        """Of 12 layers of 768: four sums each, and those of the recompute, of which a ViT needs the attention's alone;
        with sequence parallelism a scatter each, and a gather for each product's input, in backward too. A BERT sums
        its embedding, the gradient of its head, and its softmax. Whole are norms, biases of what is summed, positions,
        the classifier, and the head's transform, of 768 x 768."""
        entry = model_entry(model)
        bert, tokens = model == "bert-base", 64 if model == "bert-base" else 197
        u = 2 * tokens * 768 * 2
        one, two, four = (
            stage_of(
                entry, Stage(layers=range(12), tensor=t), batch=2, sequence=tokens, checkpointing=checkpointing,
                attention="math",
            )[0]
            for t in (1, 2, 4)
        )  # fmt: skip
        sums = [row for m in four.moments for row in m.collectives if row[2] == u]
        again = (2 if bert else 1) if checkpointing else 0
        assert sums == [("all_reduce", "tensor", u)] * (12 * (4 + again) + 2 * bert)
        assert [w.moments[0].start_bytes - w.moments[-1].end_bytes for w in (one, two, four)] == [0, 0, 0]
        not_split = 3 * 2 * tokens * 768**2 if bert else 2 * 2 * 196 * 768**2 + 3 * 2 * 768 * 1000
        assert 2 * two.flops == one.flops + 2 * not_split
        blocks = 12 * (2 * 768 + 4 * 768)  # two biases, two norms
        tables = (512 + 2) * 768 + 2 * 768 if bert else (1 + 197) * 768 + (3 * 16**2 + 1) * 768
        outside = tables + (768 * 768 + 768 if bert else 768 * 1000 + 1000) + 2 * 768
        padding = 2 * -(-entry.vocab // 2) - entry.vocab
        assert 2 * two.params - one.params == blocks + outside + padding * 769
        if bert:
            split, _ = stage_of(
                entry, Stage(layers=range(12), tensor=4, sequence=True), batch=2, sequence=tokens,
                checkpointing=checkpointing, attention="math",
            )  # fmt: skip
            assert split.moments[0].start_bytes == split.moments[-1].end_bytes
            padded = 4 * -(-entry.vocab // 4) - entry.vocab
            assert 4 * split.flops == one.flops + 3 * 2 * 2 * tokens * 768 * padded
            rows = Counter(what for m in split.moments for what, _, size in m.collectives if size == u)
            assert rows == {"reduce_scatter": len(sums), "all_gather": 12 * (6 + again) + 3}

    @pytest.mark.parametrize("checkpointing", [True, False])
    def test_ranks_keep_their_tokens_of_a_vits_embedding(self, checkpointing: bool) -> None:
        """Of 49 patches and the class token, which every rank embeds; its gradient comes together for the tables."""
        entry, u = structs.replace(model_entry("vit-b-16"), patch=32, max_seq=50), 2 * 50 * 768 * 2
        whole, split = (
            stage_of(
                entry, Stage(layers=range(2), tensor=2, sequence=sequence), batch=2, sequence=50,
                checkpointing=checkpointing,
            )[0]
            for sequence in (False, True)
        )  # fmt: skip
        assert split.moments[0].start_bytes == split.moments[-1].end_bytes
        first = "begin:vit.layers.0.layernorm_before"
        embedded = [next(m.start_bytes for m in w.moments if m.name == first) for w in (whole, split)]
        assert embedded[0] - embedded[1] == u // 2
        again = 2 if checkpointing else 0
        rows = [row for m in split.moments for row in m.collectives if row[0] == "all_gather"]
        assert rows == [("all_gather", "tensor", u)] * (2 * (6 + again) + 1)
        (last,) = (m for m in split.moments if m.name == "grad:vit.embeddings")
        assert last.collectives == (("all_gather", "tensor", u),)

    @pytest.mark.parametrize(
        ("stage", "axes", "message"),
        [
            (Stage(layers=range(2), sequence=True), {}, "give tp of 2 or more, or leave sp out"),
            (Stage(layers=range(2), tensor=3, sequence=True), {}, "sequence is 64; 3 ranks split it (sp); 63 would do"),
            (Stage(layers=range(2), tensor=2, sequence=True), {"autocast": "bf16"}, "leave the autocast or sp out"),
        ],
    )
    def test_a_sequence_that_is_not_split_says_why(self, stage: Stage, axes: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelError) as error:
            stage_of(model_entry("gpt2"), stage, batch=1, sequence=64, **axes)
        assert message in str(error.value)

    @pytest.mark.parametrize(
        ("model", "ranks", "message"),
        [
            ("gpt2", 5, "tp is 5; it divides 12 heads, 12 heads of keys and 3072 feed-forward columns, as 4 would"),
            ("bert-base", 8, "as 4 would"),  # 6 would not on 8 GPUs
            ("gpt2-xl", 8, "25 heads of keys and 6400 feed-forward columns, as 5 would on a multiple of 5 GPUs"),
            ("llama-3.1-8b", 16, "as 8 would"),
            (
                "gemma-3-1b",
                2,
                "4 heads, 1 head of keys and 6912 feed-forward columns, which only 1 would: leave tp out",
            ),
            ("qwen3-30b-a3b", 8, "6144 feed-forward columns and 768 columns of an expert, as 4 would"),
        ],
    )
    def test_a_model_that_does_not_split_says_what_would(self, model: str, ranks: int, message: str) -> None:
        with pytest.raises(ModelError) as error:
            stage_of(model_entry(model), Stage(layers=range(2), tensor=ranks), batch=1, sequence=64)
        assert message in str(error.value)


class TestContextParallel:
    """Ranks that split each of two sequences of 256 tokens."""

    def share(self, model: str, ranks: int, *, tensor: int = 1, sequence: bool = False, **axes: Any) -> Workload:
        part = Stage(layers=range(2), context=ranks, tensor=tensor, sequence=sequence)
        return stage_of(model_entry(model), part, batch=2, sequence=256, **axes)[0]

    @pytest.mark.parametrize("model", ["gpt2", "llama-3.2-1b", "gemma-3-4b", "deepseek-v3"])
    @pytest.mark.parametrize("axes", [{}, {"checkpointing": False}, {"recompute": "attention", "loss": "chunked"}])
    def test_the_ranks_together_do_the_work_of_one(self, model: str, axes: dict[str, Any]) -> None:
        """Scores too, windows included: parts of 2c are balanced under the causal mask. Each rank has all parameters,
        and at the end of the iteration what it had at its begin."""
        whole = self.share(model, 1, **axes)
        needed = sum(needed_flops(call) for m in whole.moments for call in m.attentions)
        for ranks in (2, 4):
            part = self.share(model, ranks, **axes)
            assert part.flops * ranks == whole.flops and part.tokens * ranks == whole.tokens
            assert part.params == whole.params and part.moments[0].start_bytes == part.moments[-1].end_bytes
            mine = sum(needed_flops(call) for m in part.moments for call in m.attentions)
            assert mine * ranks == pytest.approx(needed, rel=1e-12)

    def test_bytes_of_keys_and_values_are_those_of_the_formula(self) -> None:
        """A layer's 4 b s h_kv bytes of all ranks, of which each sends its part c - 1 times: once in forward, once in
        the recompute, and twice in backward, as keys and values and as their gradients."""
        size = 2 * 2 * 256 * 8 * 64 * 2  # keys and values, sequences, tokens, heads of keys, width, bytes of bf16
        for checkpointing, forward in ((True, 2), (False, 1)):
            w = self.share("llama-3.2-1b", 4, checkpointing=checkpointing)
            rows = Counter(row for m in w.moments for row in m.collectives)
            assert rows == {
                ("all_gather", "context", size): 2 * (forward + 1), ("reduce_scatter", "context", size): 2
            }  # fmt: skip

    @pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (2, True)])
    def test_what_a_layer_keeps_is_a_part_of_that_of_one_rank(self, tensor: int, sequence: bool) -> None:
        """Of every tensor a c-th."""
        kept = []
        for ranks in (1, 2, 4):
            ends = []
            for layers in (1, 2):
                part = Stage(layers=range(layers), context=ranks, tensor=tensor, sequence=sequence)
                axes = {"kernels": "megatron", "checkpointing": False}
                w, _ = stage_of(model_entry("gpt2-medium"), part, batch=2, sequence=256, **axes)
                ends.append(next(m.start_bytes for m in w.moments if m.name == "begin:transformer.ln_f"))
            kept.append(ends[1] - ends[0])
        assert kept[0] == 2 * kept[1] == 4 * kept[2] > 0

    @pytest.mark.parametrize(
        ("stage", "tokens", "axes", "message"),
        [
            (Stage(layers=range(2), context=3), 256, {}, "sequence is 256; cp=3 cuts it into 6 equal pieces; 258 wou"),
            (Stage(layers=range(2), context=3), 1024, {}, "6 equal pieces; 1020 would do"),  # of 1,024 positions
            (Stage(layers=range(2), context=2, tensor=3, sequence=True), 256, {}, "12 equal pieces; 252 would do"),
            (Stage(layers=range(2), context=2), 256, {"attention": "math"}, "ranks that split the sequence (cp) run"),
        ],
    )  # fmt: skip
    def test_a_sequence_that_is_not_split_says_what_would(
        self, stage: Stage, tokens: int, axes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ModelError) as error:
            stage_of(model_entry("gpt2"), stage, batch=1, sequence=tokens, **axes)
        assert message in str(error.value)


class TestExperts:
    """Ranks that share, or split, the experts of two layers, with two sequences of 64 tokens each."""

    def share(self, model: str, *, axes: dict[str, Any] | None = None, **ranks: Any) -> Workload:
        return stage_of(model_entry(model), Stage(layers=range(2), **ranks), batch=2, sequence=64, **(axes or {}))[0]

    @pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"])
    @pytest.mark.parametrize("axes", [{}, {"checkpointing": False}, {"kernels": "fused"}])
    def test_the_ranks_together_do_the_work_of_one(self, model: str, axes: dict[str, Any]) -> None:
        """Loads are balanced: the rows that a rank's experts get are as many as it sends. Ranks that split layers and
        not the tokens all route all of them: two products in forward and recompute, four in backward."""
        whole, entry = self.share(model, axes=axes), model_entry(model)
        assert entry.experts is not None
        routed = 2 * (2 * 64) * entry.hidden * entry.experts.count * 2  # flops of two layers
        for ranks in ({"experts": 4}, {"tensor": 2, "sequence": True}, {"tensor": 2}, {"tensor": 2, "experts": 4}):
            part = self.share(model, axes=axes, **ranks)
            passes = 3 if axes.get("checkpointing") is False else 4
            beside = routed * passes if ranks.get("tensor") and not ranks.get("sequence") else 0
            assert part.flops * ranks.get("tensor", 1) == whole.flops + beside
            assert part.moments[0].start_bytes == part.moments[-1].end_bytes
            assert part.peak_non_model_bytes <= whole.peak_non_model_bytes

    @pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, True), (2, False)])
    def test_each_has_a_part_of_the_experts_and_all_else(self, tensor: int, sequence: bool) -> None:
        def params(ranks: int) -> tuple[int, int]:
            w = self.share("qwen3-30b-a3b", experts=ranks, tensor=tensor, sequence=sequence)
            of = {t.spread: 0 for t in w.tensors}
            for t in w.tensors:
                of[t.spread] += t.numel
            assert ranks == 1 or all((t.spread == ranks) == (".experts." in t.name) for t in w.tensors)
            return of[ranks] if ranks > 1 else 0, w.params

        _, whole = params(1)
        experts = 2 * 128 * 3 * 768 * 2048 // tensor
        for ranks in (2, 8, 128):
            assert params(ranks) == (experts // ranks, whole - experts + experts // ranks)

    def test_bytes_of_the_all_to_alls_are_those_of_the_formula(self) -> None:
        """A rank has tokens x 8 rows of 2,048: dispatch and combine, once in forward, once in the recompute and twice
        in backward, of two layers. Ranks that split layers and the tokens have their part of the rows, and gather
        those of the others, or sum them."""
        rows = 2 * 64 * 8 * 2048 * 2
        for axes, times in (({}, 3), ({"checkpointing": False}, 2)):
            (found,) = Counter(
                row for m in self.share("qwen3-30b-a3b", axes=axes, experts=4).moments for row in m.collectives
            ).items()
            assert found == (("all_to_all", "experts", rows), 2 * 2 * times)
        both = Counter(
            row
            for m in self.share("qwen3-30b-a3b", experts=4, tensor=2, sequence=True).moments
            for row in m.collectives
        )
        assert both["all_to_all", "experts", rows // 2] == 12
        assert both["all_gather", "tensor", rows] == both["reduce_scatter", "tensor", rows] == 2 * 3

    @pytest.mark.parametrize(
        ("model", "ranks", "message"),
        [
            ("qwen3-30b-a3b", 24, "ep is 24; it divides the 128 experts of a layer, as 16 would"),
            ("llama-3.2-1b", 2, "ep is 2; the model has no experts; leave ep out"),
        ],
    )
    def test_experts_that_are_not_shared_say_what_would(self, model: str, ranks: int, message: str) -> None:
        with pytest.raises(ModelError) as error:
            self.share(model, experts=ranks)
        assert message in str(error.value)


def test_a_stage_has_an_order_of_its_own() -> None:
    w = stage("gpt2", 0, 2, 4)
    assert w.order is Order.PIPELINED and w.relayed and w.micro_batches == 4


class TestParallelism:
    @pytest.mark.parametrize(
        "text",
        [
            "pp=1",
            "tp=2",
            "tp=2,sp,pp=4",
            "cp=2,ep=4",
            "pp=2,schedule=gpipe",
            "pp=2,dp=3,shard=states",
            "pp=4,schedule=interleaved,v=3",
        ],
    )
    def test_a_text_and_its_value_are_each_others_reverse(self, text: str) -> None:
        assert str(Parallelism.parse(text)) == text

    @pytest.mark.parametrize(
        ("text", "composed"),
        [
            ("pp=1", "replica(stage())"),
            ("tp=4,sp,dp=2", "replica(stage(split(4, sequence=True)), count=2)"),
            ("pp=2", "replica(pipeline(stage(), stage()))"),
            ("cp=2,dp=2", "replica(stage(split(context=2)), count=2)"),
            ("tp=2,sp,cp=4", "replica(stage(split(2, sequence=True, context=4)))"),
            ("ep=4", "replica(stage(split(experts=4)))"),
            ("tp=2,pp=2,dp=4", "replica(pipeline(stage(split(2)), stage(split(2))), count=4)"),
            ("pp=3,schedule=gpipe", 'replica(pipeline(stage(), stage(), stage(), schedule="gpipe"))'),
            ("pp=2,schedule=interleaved,v=2", 'replica(pipeline(stage(), stage(), schedule="interleaved", virtual=2))'),
            ("dp=2,shard=states", 'replica(stage(), count=2, shard="states")'),
            ("pp=2,cut=speed", 'replica(pipeline(stage(), stage(), cut="speed"))'),
        ],
    )
    def test_a_text_and_whales_primitives_are_each_others_reverse(self, text: str, composed: str) -> None:
        names = {"replica": replica, "pipeline": pipeline, "stage": stage_part, "split": split}
        made = eval(composed, names)
        assert made == Parallelism.parse(text) and str(made) == text and made.composed == composed

    def test_primitives_that_do_not_nest_say_why(self) -> None:
        with pytest.raises(
            PstarError,
            match=r"stage 1 is stage\(\) and stage 0 stage\(split\(2\)\); .* so give stage\(split\(2\)\) for",
        ):
            pipeline(stage_part(split(2)), stage_part())
        with pytest.raises(PstarError, match=r"so give stage\(split\(context=2\)\) for each"):
            pipeline(stage_part(), stage_part(split(context=2)))
        with pytest.raises(PstarError, match="a stage holds a split or nothing"):
            stage_part(replica(stage_part(), count=2))
        with pytest.raises(PstarError, match="replicas of replicas are one replica"):
            replica(replica(stage_part(), count=2), count=2)
        with pytest.raises(PstarError, match="give its stages"):
            pipeline()

    @pytest.mark.parametrize(
        ("make", "name"),
        [(stage_part, "stage"), (pipeline, "pipeline"), (replica, "replica"), (Parallelism.parse, "parallelism")],
    )
    def test_what_is_no_parallelism_is_named(self, make: Callable[[Any], Parallelism], name: str) -> None:
        with pytest.raises(PstarError, match=f"^{name} = 5: it must be "):
            make(5)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("zz=4", "'zz=4' is not one of tp=, sp, cp=, ep=, pp=, dp=, schedule=, v=, cut=, shard="),
            ("pp=2,v=2", "v is 2 and pp is 2; pp=2 or more, schedule=interleaved and v=2 or more go together"),
            ("v=2,schedule=interleaved", "v is 2 and pp is 1"),
            ("pp=2,schedule=interleaved", "v is 1 and pp is 2"),
            ("pp=2,schedule=interleaved,v=2,cut=speed", "cut=speed is for stages of one part"),
            ("pp=2,pp=4", "'pp=4' gives pp again"),
            ("tp", "'tp' has no value; write tp=, with one"),
            ("tp=2,schedule=gpipe", "schedule=gpipe is for pipelines; give pp=2 or more, or leave it out"),
            ("cut=speed", "cut=speed is for pipelines"),
            ("shard=", "parallelism: shard = '': it must be one of none, states, parameters"),
            ("pp=0", "parallelism: pp = 0"),
            ("cp=0", "parallelism: cp = 0"),
            ("tp=2,sp=2", "'sp=2' has a value; write sp alone"),
            ("pp=many", "parallelism: pp = 'many'"),
            ("schedule=zb", "parallelism: schedule"),
        ],
    )
    def test_a_wrong_word_is_named(self, text: str, message: str) -> None:
        with pytest.raises(PstarError) as error:
            Parallelism.parse(text)
        assert message in str(error.value)

    @pytest.mark.parametrize(
        ("text", "gpus", "message"),
        [
            ("pp=3", 8, "pp=3 is 3 GPUs, and the machine has 8; pp=2 or pp=4 would do"),
            ("cp=2", 1, "cp=2 is 2 GPUs, and the machine has 1; cp=1 would do"),
            ("tp=4,dp=3", 8, "tp=4 times dp=3 is 12 GPUs, and the machine has 8; dp=2 would do"),
            ("tp=3,pp=2", 8, "tp=3 times pp=2 is 6 GPUs, and the machine has 8; tp=2 or tp=4 would do"),
            ("tp=3,dp=3", 8, "; tp=2,dp=4 or tp=4,dp=2 would do"),
            ("tp=2,pp=2,dp=4", 8, "; tp=1 or pp=1 would do"),
            ("pp=2,schedule=gpipe", 3, "; pp=3 would do"),
            ("tp=2,sp", 1, "; tp=1 without sp would do"),
        ],
    )
    def test_degrees_that_are_not_the_gpus_name_the_nearest_that_are(self, text: str, gpus: int, message: str) -> None:
        with pytest.raises(PstarError) as error:
            Parallelism.parse(text).data_on(gpus)
        assert str(error.value).endswith(message)

    def test_ranks_that_share_experts_divide_those_that_share_sequences(self) -> None:
        with pytest.raises(PstarError, match="ep divides the 4 ranks of dp and cp, as ep=2 would"):
            Parallelism(tensor=2, context=2, experts=3).data_on(8)
        assert Parallelism(tensor=2, context=2, experts=4).data_on(8) == 2
