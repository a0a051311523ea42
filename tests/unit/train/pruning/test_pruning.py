"""Algorithm 1 on graphs small enough to prune by hand."""

import pytest

from coserve.train.pruning.choice import ATTENTION, Choice
from coserve.train.pruning.graph import Graph, Operator, Role, Value, border, needed, prune
from coserve.train.save_policy import Fate


def graph_of(
    forward: list[tuple[str, str, str, float]],
    reverse: list[tuple[str, str, str]],
    frozen: str = "",
    wanted: str = "",
    **marks: object,
) -> tuple[Graph, dict[str, int]]:
    """Operators as (kind, inputs, outputs) and operations, values by name: capitals are weights, x is the
    input, and what begins with d a gradient."""
    names: dict[str, int] = {}

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(names.setdefault(name, len(names)) for name in text.split())

    ahead = tuple(Operator(kind, numbers(i), numbers(o), flops) for kind, i, o, flops in forward)
    back = tuple(Operator(kind, numbers(i), numbers(o)) for kind, i, o in reverse)
    ends = frozenset(numbers(frozen)), frozenset(numbers(wanted))

    def role(name: str) -> Role:
        if name[0].isupper():
            return Role.WEIGHT
        if name == "x":
            return Role.INPUT
        return Role.GRADIENT if name[0] == "d" else Role.ACTIVATION

    values = {number: Value(number, name, role(name), 16.0, 8.0) for name, number in names.items()}
    return Graph(values, ahead, back, *ends, **marks), names  # type: ignore[arg-type]


def mlp() -> tuple[Graph, dict[str, int]]:
    """FlexLLM's figure 7: two linears with a ReLU between them, LoRA beside the second one."""
    graph, names = graph_of(
        [
            ("mm", "x W1", "h", 100.0),
            ("relu", "h", "a", 1.0),
            ("mm", "a W2", "p", 100.0),
            ("mm", "a A", "r", 4.0),
            ("addmm", "p r B", "y", 4.0),
        ],
        [
            ("mm", "dy B", "dr"),
            ("mm", "dy r", "dB"),
            ("mm", "dr a", "dA"),
            ("mm", "dy a", "dW2"),
            ("mm", "dy W2", "da1"),
            ("mm", "dr A", "da2"),
            ("add", "da1 da2", "da"),
            ("threshold_backward", "da a", "dh"),
            ("mm", "dh x", "dW1"),
            ("mm", "dh W1", "dx"),
        ],
        frozen="dW1 dW2",
        wanted="dA dB",
    )
    return graph, names


def names_of(graph: Graph, values: frozenset[int]) -> set[str]:
    return {graph.values[value].name for value in values}


def test_what_only_frozen_weights_asked_for_goes_to_a_fixed_point() -> None:
    """Without the input's gradient nothing below the second linear goes back: da, dh and dx lose their users
    one after the other."""
    graph, _ = mlp()
    left = [names_of(graph, frozenset(operator.outputs)) for operator in prune(graph)]
    assert left == [{"dr"}, {"dB"}, {"dA"}]
    assert names_of(graph, border(graph, graph.reverse)) == {"r", "a", "x"}
    assert names_of(graph, border(graph, prune(graph))) == {"r", "a"}


def test_an_input_that_is_asked_for_keeps_the_way_to_it() -> None:
    graph, names = mlp()
    asked = Graph(graph.values, graph.forward, graph.reverse, graph.frozen, graph.wanted | {names["dx"]})
    left = {name for operator in prune(asked) for name in names_of(graph, frozenset(operator.outputs))}
    assert left == {"dr", "dB", "dA", "da1", "da2", "da", "dh", "dx"}
    assert names_of(graph, border(asked, prune(asked))) == {"r", "a"}


def test_an_operator_that_loses_one_of_its_outputs_stays() -> None:
    graph, _ = graph_of(
        [("norm", "x W", "n m", 1.0)], [("norm_backward", "dn x m", "dx dW")], frozen="dW", wanted="dx"
    )
    (left,) = prune(graph)
    assert names_of(graph, frozenset(left.outputs)) == {"dx"}
    assert names_of(graph, border(graph, (left,))) == {"x", "m"}


def test_what_is_needed_ends_where_something_is_at_hand() -> None:
    graph, names = mlp()
    found = needed(graph, {names["r"]}, {names["a"]})
    assert names_of(graph, found) == {"r", "a", "A"}
    found = needed(graph, {names["r"]}, {names["x"]})
    assert names_of(graph, found) == {"r", "a", "A", "h", "x", "W1"}


def choice_with(wanted: str, lora: bool) -> Choice:
    """Of the same network, whose products can be kept; `lora` or nothing beside the second linear."""
    graph, names = mlp()
    reverse = (
        graph.reverse
        if lora
        else tuple(o for o in graph.reverse if names["dr"] not in (*o.inputs, *o.outputs))
    )
    graph = Graph(
        graph.values,
        graph.forward,
        reverse,
        graph.frozen,
        frozenset(names[name] for name in wanted.split()),
        {"first": names["h"], "second": names["p"]},
        {"first": names["h"], "second": names["y"]},
    )
    return Choice(graph, {"first", "second"})


def test_a_products_value_that_nobody_asks_for_is_not_used() -> None:
    choice = choice_with("dA dB dx", lora=True)
    assert choice.worthwhile() == {"first"}
    assert choice.fates({"first"}) == {"first": Fate.KEPT, "second": Fate.UNUSED, ATTENTION: Fate.UNUSED}
    assert choice.fates(()) == {"first": Fate.COMPUTED, "second": Fate.UNUSED, ATTENTION: Fate.UNUSED}
    assert choice.nbytes(choice.fates({"first"})) == 16.0


def test_a_relu_that_is_asked_for_its_sign_alone_is_kept_as_bits() -> None:
    """Once LoRA hangs on the second linear, its values are asked for too."""
    graph, names = mlp()
    reverse = (
        Operator("mm", (names["dy"], names["W2"]), (names["da"],)),
        *(o for o in graph.reverse if o.kind == "threshold_backward"),
        Operator("mm", (names["dh"], names["W1"]), (names["dx"],)),
    )
    bare = Graph(
        graph.values, graph.forward, reverse, frozenset(), frozenset({names["dx"]}),
        {"first": names["h"], "second": names["p"]}, {"first": names["h"], "second": names["y"]},
    )  # fmt: skip
    choice = Choice(bare, {"first", "second"})
    (activation,) = choice.savable
    assert (activation.name, activation.fate, activation.nbytes) == ("first", Fate.SIGN, 1.0)  # 8 numbers
    assert choice.fates({"first"})["first"] is Fate.SIGN
    assert choice.fates(())["first"] is Fate.COMPUTED
    assert choice.nbytes(choice.fates({"first"})) == 1.0
    (whole,) = choice_with("dA dB dx", lora=True).savable
    assert (whole.fate, whole.nbytes) == (Fate.KEPT, 16.0)


def test_what_the_threshold_calls_cheap_is_computed_again() -> None:
    choice = choice_with("dA dB dx", lora=True)
    assert choice.worthwhile(dear=0.4) == {"first"} and choice.worthwhile(dear=0.6) == frozenset()


@pytest.mark.parametrize("reader", ["attend_back", "mul"])
def test_cached_keys_stand_for_a_product_where_only_attention_reads_it(reader: str) -> None:
    graph, names = graph_of(
        [("mm", "x W", "k", 100.0), ("attend", "x k", "o l", 1.0), ("add", "o x", "y", 1.0)],
        [("attend_back", "dy x k o l", "dq dk"), (reader, "dk k", "dx")],
        wanted="dx",
    )
    graph = Graph(
        graph.values, graph.forward, graph.reverse, frozenset(), graph.wanted,
        {"keys": names["k"]}, {"keys": names["k"]}, (names["o"], names["l"]), (names["k"],),
    )  # fmt: skip
    fate = Choice(graph, {"keys"}).fates({ATTENTION})["keys"]
    assert fate is (Fate.UNUSED if reader == "attend_back" else Fate.COMPUTED)
