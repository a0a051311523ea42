"""The dialect's protobuf messages are those of the client's own schema."""

import random
import struct
from typing import Any

import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as public
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from coserve.core.plan import TokenLogprobs
from coserve.core.request import FinishReason
from coserve.core.training import PassOutput
from coserve.errors import DataError
from coserve.serve.answering.answers import AnswerPiece
from coserve.serve.tinker import protocol
from coserve.serve.tinker.passes import pass_json, pass_payload, read_pass
from coserve.serve.tinker.sampled import PromptScores, sample_json, sample_payload
from coserve.wire.scores import Scores


@pytest.mark.parametrize("name", ["SampleResponse", "ForwardBackwardRequest", "ForwardBackwardOutput"])
def test_every_field_has_the_client_s_number_and_type(name: str) -> None:
    """Fields that are left out here are those of features that are not supported."""

    def compare(ours: Any, theirs: Any) -> None:
        for field in ours.fields:
            other = theirs.fields_by_number[field.number]
            assert (field.name, field.type, field.is_repeated) == (other.name, other.type, other.is_repeated)
            if field.message_type is not None:
                compare(field.message_type, other.message_type)

    compare(protocol.message_class(name).DESCRIPTOR, getattr(public, name).DESCRIPTOR)


def test_a_pass_is_read_as_the_client_writes_it() -> None:
    draws = random.Random(3)
    data = []
    for _ in range(5):
        length = draws.randrange(1, 30)
        inputs = {
            "target_tokens": types.TensorData(
                data=[draws.randrange(1000) for _ in range(length)], dtype="int64", shape=[length]
            ),
            "weights": types.TensorData(
                data=[draws.random() for _ in range(length)], dtype="float32", shape=[length]
            ),
        }
        tokens = types.ModelInput.from_ints([draws.randrange(1000) for _ in range(length)])
        data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
    given = types.ForwardBackwardInput(data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5})
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="run", seq_id=7)
    read = read_pass(forward_backward_request_to_proto(request).SerializeToString(), "")
    assert (read.model_id, read.seq_id, read.loss, read.problem) == ("run", 7, "ppo", "")
    assert read.settings == {"clip_low_threshold": 0.5} and not read.forward_only
    for one, datum in zip(read.data, data, strict=True):
        assert list(one.tokens) == datum.model_input.to_ints()
        assert list(one.targets) == list(datum.loss_fn_inputs["target_tokens"].data)
        assert one.inputs["weights"] == pytest.approx(datum.loss_fn_inputs["weights"].data)


def test_replies_are_read_by_the_client_as_they_were_meant() -> None:
    logprobs, losses = ((-0.5, -1.0), (-2.0,)), ((0.0, 0.75), (0.75,))
    for given, fields in (
        (losses, {"logprobs": logprobs, "elementwise_loss": losses}),
        ((), {"logprobs": logprobs}),
    ):
        payload = pass_payload(PassOutput(1.5, logprobs, {"tokens": 3.0}, given))
        out = deserialize_forward_backward_output(payload.body)
        assert out.loss_fn_output_type == "scalar" and out.metrics == {"loss:sum": 1.5, "tokens:sum": 3.0}
        as_json = pass_json(payload.body)["loss_fn_outputs"]
        for number, (one, same) in enumerate(zip(out.loss_fn_outputs, as_json, strict=True)):
            assert one.keys() == same.keys() == fields.keys()
            for name, column in fields.items():
                told = {"data": list(column[number]), "dtype": "float32", "shape": [len(column[number])]}
                assert same[name] == told == {key: getattr(one[name], key) for key in told}
    empty = pass_payload(PassOutput(0.0, ()))
    assert deserialize_forward_backward_output(empty.body).loss_fn_outputs == []


@pytest.mark.parametrize(("last", "known"), [(None, [None, -1.0, -2.0]), (1, [None, None, -2.0])])
def test_samples_are_read_by_the_client_as_they_were_meant(
    last: int | None, known: list[float | None]
) -> None:
    scores = Scores.of((TokenLogprobs(-1.0, ((4, -0.5), (5, -1.0))), TokenLogprobs(-2.0, ((6, -2.0),))))
    answer = AnswerPiece(0, "ab", (7, 8), finish=FinishReason.STOP, cached=2, scores=scores)
    payload = sample_payload([answer], 2, PromptScores(scores, 1, last))
    got = deserialize_sample_response(payload.body)
    (one,) = got.sequences
    assert (one.tokens, one.logprobs, one.stop_reason) == ([7, 8], [-1.0, -2.0], "stop")
    assert one.topk_logprobs == [[(4, -0.5), (5, -1.0)], [(6, -2.0)]]
    assert got.prompt_logprobs == known and got.prompt_cache_hit_tokens == 2
    assert got.topk_prompt_logprobs is not None and got.topk_prompt_logprobs[2] == [(6, -2.0)]
    assert sample_json(payload.body)["prompt_logprobs"] == known


def test_parts_are_counted_before_they_are_made() -> None:
    message = public.ForwardBackwardRequest(model_id="m", seq_id=1)
    for _ in range(10):
        message.data.add().model_input.add().encoded_text.tokens = struct.pack("<i", 1)
    body = message.SerializeToString()
    assert len(protocol.parse("ForwardBackwardRequest", body, 132).data) == 10
    with pytest.raises(DataError, match="more than 131 parts"):
        protocol.parse("ForwardBackwardRequest", body, 131)
    unknown = b"\x7a\x00" * 132  # fields that the schema does not have take time too
    with pytest.raises(DataError, match="more than 131 parts"):
        protocol.parse("ForwardBackwardRequest", unknown, 131)
    with pytest.raises(DataError, match="not a valid protobuf message"):
        protocol.parse("ForwardBackwardRequest", bytes(10), 131)
