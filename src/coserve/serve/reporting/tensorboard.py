"""TensorBoard: event files under `reports/tensorboard/JOB` in the state folder."""

import json
import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from coserve.core.job_status import JobStatus
from coserve.serve.reporting.reporter import JobAbout

_STRING = 7  # DT_STRING


class TensorBoardRun:
    """A job's event file; a job that goes on under another server has a second one in its folder."""

    def __init__(self, about: JobAbout) -> None:
        self._writer = EventFileWriter(str(about.folder / "tensorboard" / about.job))
        text = json.dumps(dict(about.settings), indent=2, default=str)
        tensor = TensorProto(
            dtype=_STRING, string_val=[f"```\n{text}\n```".encode()], tensor_shape=TensorShapeProto()
        )
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag="settings/text_summary", tensor=tensor, metadata=metadata)
        self._add(0, [value])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._add(step, [Summary.Value(tag=name, simple_value=number) for name, number in figures.items()])

    def end(self, status: JobStatus) -> None:
        self._writer.close()

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def open_run(about: JobAbout) -> TensorBoardRun:
    """A job's run."""
    return TensorBoardRun(about)
