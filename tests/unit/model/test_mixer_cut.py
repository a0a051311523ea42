"""Recurrent mixers that are cut by heads: what a rank has of them, and which ones are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coserve.adapters.text_part import keep_text
from coserve.errors import UnsupportedModel
from coserve.model.sharded.mixers import MixerCut
from coserve.model.sharded.plan import ShardPlan
from coserve.parallel.ranks import Ranks
from coserve.parallel.search import Cut
from coserve_benchmarks.models import shrunk
from recurrent import build
from threaded_ranks import ThreadRanks, on_ranks


def rank_of(number: int, count: int) -> Ranks:
    rank = Ranks()
    rank.number, rank.count = number, count
    return rank


@pytest.mark.parametrize(
    ("name", "changes", "count", "words"),
    [
        ("mamba2", {}, 4, "the 6 heads of backbone.layers.0.mixer cannot be divided over 4 ranks"),
        ("mamba2", {"n_groups": 3}, 2, "the 3 groups of heads of backbone.layers.0.mixer cannot be"),
        ("mamba2", {"state_size": 7}, 2, "the 7 numbers of groups of backbone.layers.0.mixer cannot be"),
        ("qwen3_5_text", {}, 4, "the 2 heads of keys of model.layers.0.linear_attn cannot be divided"),
        ("lfm2", {}, 2, "lfm2 is not supported: transformers has no tensor-parallel plan for it"),
    ],
)
def test_what_ranks_do_not_divide_is_refused(
    name: str, changes: dict[str, Any], count: int, words: str
) -> None:
    with torch.device("meta"):
        model = build(name, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        ShardPlan.of(model, count)


def test_the_text_part_of_a_multimodal_model_is_cut_by_heads() -> None:
    """Its layers are below other modules than those of the language model alone."""
    with torch.device("meta"):
        model = shrunk.build("qwen3_5")
    keep_text(model)
    plan, path = ShardPlan.of(model, 2), "model.language_model.layers.0.linear_attn"
    assert path in plan.mixers and f"{path}.in_proj_qkv" in plan.pieces
    assert plan.linears[f"{path}.out_proj"] is Cut.ROWWISE and plan.gathered == {"lm_head"}


def test_a_rank_has_its_heads() -> None:
    """Of two groups of B and C, which two ranks share each, a rank has all of one."""
    changes = {"num_heads": 8, "head_dim": 12, "n_groups": 2}
    whole = build("mamba2", **changes).backbone.layers[1].mixer
    inner, kernels, channels = 96, whole.conv1d.weight.data, range(96 + 2 * 2 * 8)
    for number in range(4):
        own: Any = build("mamba2", **changes).backbone.layers[1].mixer
        cut = MixerCut.of("mamba2", "mixer", own, 4)
        assert cut is not None and cut.across
        cut.cut(own, rank_of(number, 4))
        group = number // 2
        b, c = (range(start + 8 * group, start + 8 * group + 8) for start in (inner, inner + 16))
        rows = [channels[i] for span in (range(24 * number, 24 * number + 24), b, c) for i in span]
        assert torch.equal(own.conv1d.weight, kernels[rows])
        assert torch.equal(own.conv1d.bias, whole.conv1d.bias[rows])
        for name in ("A_log", "D", "dt_bias"):
            assert torch.equal(getattr(own, name), getattr(whole, name)[2 * number : 2 * number + 2])
        assert torch.equal(own.norm.weight, whole.norm.weight[24 * number : 24 * number + 24])
        assert (own.num_heads, own.n_groups, own.intermediate_size, own.conv_dim) == (2, 1, 24, len(rows))


@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (4, 2)])
def test_norms_over_ranks_are_the_models_own(ranks: int, groups: int) -> None:
    """Forward, and the gradients of numbers and gates."""
    changes = {"num_heads": 8, "head_dim": 12, "n_groups": groups}
    norm: Any = build("mamba2", **changes).backbone.layers[0].mixer.norm
    rows, gates, of_y = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(1))

    def gradients(module: Any, x: Tensor, gate: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), gate.clone().requires_grad_()]
        y = module(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    want = gradients(norm, rows, gates, of_y)

    mixers: list[Any] = [build("mamba2", **changes).backbone.layers[0].mixer for _ in range(ranks)]

    def found(rank: ThreadRanks) -> list[Tensor]:
        mixer = mixers[rank.number]
        cut = MixerCut.of("mamba2", "mixer", mixer, ranks)
        assert cut is not None
        cut.cut(mixer, rank)
        cut.join_norm("mamba2", "mixer", mixer, rank)
        parts = (rank.columns_of(x).contiguous() for x in (rows, gates, of_y))
        return [rank.columns(x) for x in gradients(mixer.norm, *parts)]

    for own in on_ranks(ranks, found):
        for one, other in zip(own, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_norm_that_computes_anything_else_is_refused() -> None:
    mixer: Any = build("mamba2").backbone.layers[0].mixer
    cut = MixerCut.of("mamba2", "mixer", mixer, 2)
    assert cut is not None
    cut.cut(mixer, rank_of(1, 2))
    own = mixer.norm.forward
    mixer.norm.forward = lambda x, gate: own(x, gate) + 1.0
    with pytest.raises(UnsupportedModel, match=r"mixer\.norm, which is one over ranks, computes another"):
        cut.join_norm("mamba2", "mixer", mixer, rank_of(1, 2))
    assert isinstance(mixer.norm, nn.Module)
