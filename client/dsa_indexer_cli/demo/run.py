"""Runs the demo: recorded steps, steps that all differ, a kill in the middle, the trace."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from dsa_indexer_recordings.recording import Recording, load

from attention_worker.fallback import InlineSelector
from attention_worker.kernels import sparse_mla
from dsa_indexer_cli.demo.cases import Case, Workload
from dsa_indexer_cli.demo.compare import SCORE_TOLERANCE, indistinguishable_rows, same_rows
from dsa_indexer_cli.demo.recorded import DECODE_LAYER, recorded_workload
from dsa_indexer_cli.demo.result import DemoResult
from dsa_indexer_cli.demo.service_process import ServiceProcess, own_environment, serve_command
from dsa_indexer_cli.demo.trace_table import stage_times, whole_traces
from dsa_indexer_cli.demo.varied import VariedSteps
from dsa_indexer_cli.trace.spans import read_trace_file
from indexer_client import ClientSettings, Session, Source, Step
from ipc_handoff.addresses import UNIX

_ATTENTION_TOLERANCE = 4e-3
_LAYERS = 3
_KILLED_LAYER = 1
# Steps before the service is started again: they must be computed inline.
_STEPS_WITHOUT_SERVICE = 3
_ATTACH_SECONDS = 20.0
# Of waits and gates. The service's death ends them at once; a machine that stands still for a
# second must not.
_BOUND_SECONDS = 10.0

Progress = Callable[[str], None]


def run_demo(trace_file: Path, varied_steps: int, progress: Progress) -> DemoResult:
    """Run everything.

    Args:
        trace_file: both processes append their spans to it; the service's log lies beside it.
        varied_steps: how many steps that all differ; at least 10.
        progress: told what is being done, once a step.

    Raises:
        OSError: a file cannot be written.
        RuntimeError: the service did not start.
    """
    began = time.monotonic()
    # As the service: with both processes on few cores, more threads only take turns spinning.
    torch.set_num_threads(1)
    log = trace_file.with_suffix(".log")
    for old in (trace_file, log):
        old.unlink(missing_ok=True)
    with (
        own_environment(),
        tempfile.TemporaryDirectory(prefix="dsa-indexer-demo-") as folder,
    ):
        demo = _Demo(load(), Path(folder), trace_file, log, progress)
        try:
            demo.run(varied_steps)
        finally:
            demo.service.kill()
    demo.result.seconds = time.monotonic() - began
    return demo.result


class _Demo:
    def __init__(
        self, recording: Recording, folder: Path, trace_file: Path, log: Path, progress: Progress
    ) -> None:
        self._recording = recording
        self._progress = progress
        self._sockets = folder / "sockets"
        address = f"{UNIX}{self._sockets / 'indexer.sock'}"
        self._settings = ClientSettings(
            address=address, trace_file=trace_file, wait_bound_seconds=_BOUND_SECONDS
        )
        command = [*serve_command(address, trace_file), "--gate-bound-seconds", str(_BOUND_SECONDS)]
        self.service = ServiceProcess(address, trace_file, log, command)
        self.result = DemoResult(trace_file)
        # Of the traced steps that the service answered.
        self._traces: set[str] = set()

    def run(self, varied_steps: int) -> None:
        self._progress("starting the service")
        self.service.start()
        self._recorded_steps()
        self._varied_steps(varied_steps)
        self._ending()
        self._trace()

    def _session(self, workload: Workload) -> tuple[Session, InlineSelector]:
        caches = {layer: shared.tensor for layer, shared in workload.k_caches.items()}
        fallback = InlineSelector(caches, workload.geometry.top_k)
        session = Session(
            workload.geometry,
            workload.k_caches,
            fallback,
            settings=self._settings,
            engine_name="demo",
        )
        return session, fallback

    def _recorded_steps(self) -> None:
        workload = recorded_workload(self._recording)
        session, _ = self._session(workload)
        with session:
            session.wait_attached(_ATTACH_SECONDS)
            for number in range(workload.steps):
                case = workload.case(number)
                self._progress(case.label)
                with session.step(case.inputs, tuple(case.queries)) as step:
                    self._recorded_layers(case, step)

    def _recorded_layers(self, case: Case, step: Step) -> None:
        for layer, query in case.queries.items():
            expected = case.expected[layer]
            out = torch.full_like(expected, -2)
            source = step.select(layer, query.q, query.weights, out=out)
            same = same_rows(out, expected)
            alike = same
            if layer in case.scores:
                alike = same | indistinguishable_rows(out, expected, case.scores[layer])
            self.result.check(
                f"{case.label}: selection against vLLM's",
                bool(alike.all()) and source is Source.SERVICE,
                f"{int(same.sum())} of {len(out)} rows the same set, {int((alike & ~same).sum())} "
                f"up to scores nearer than {SCORE_TOLERANCE:.0e}; from the {source.value}",
            )
            if layer == DECODE_LAYER:
                with step.attending(layer):
                    error = self._attention_error(out)
                self.result.check(
                    f"{case.label}: attention against FlashMLA's",
                    error <= _ATTENTION_TOLERANCE,
                    f"relative error {error:.1e}, allowed {_ATTENTION_TOLERANCE:.0e}",
                )
        self._note_trace(step, source)

    def _attention_error(self, indices: torch.Tensor) -> float:
        attention = self._recording.attention
        rows = torch.arange(len(indices), dtype=torch.int32)
        slots = sparse_mla.to_slots(
            indices, rows, attention.block_table, attention.kv_cache.shape[1]
        )
        found = sparse_mla.attend(attention.q, attention.kv_cache, slots, attention.scale)
        assert isinstance(found, torch.Tensor)
        wanted = attention.out.double()
        return float((found.double() - wanted).norm() / wanted.norm())

    def _varied_steps(self, steps: int) -> None:
        workload = VariedSteps(self._recording, _LAYERS, steps).workload()
        kill_at = steps // 2
        restart_at = kill_at + _STEPS_WITHOUT_SERVICE
        equal, expected_rows = 0, set()
        sources: list[list[Source]] = []
        attached_again = 0.0
        session, _ = self._session(workload)
        with session:
            session.wait_attached(_ATTACH_SECONDS)
            for number in range(steps):
                case = workload.case(number)
                if number == restart_at:
                    attached_again = self._restart(session)
                self._progress(f"{case.label} of {steps}")
                with session.step(case.inputs) as step:
                    answers, found = self._varied_layers(case, step, number == kill_at)
                sources.append(found)
                for layer, expected in case.expected.items():
                    equal += bool(torch.equal(answers[layer], expected))
                    expected_rows |= {row.numpy().tobytes() for row in expected}
                self._note_trace(step, found[-1])
            detachments = session.statistics.detachments
        selections = steps * _LAYERS
        rows = selections * len(case.inputs.seq_lens)
        self.result.check(
            "varied steps: no two rows have the same answer",
            len(expected_rows) == rows,
            f"{len(expected_rows)} different answers in {rows} rows",
        )
        self.result.check(
            "varied steps: selection against the reference, bit for bit",
            equal == selections,
            f"{equal} of {selections} selections",
        )
        self._check_survival(sources, kill_at, restart_at, detachments, attached_again)

    def _varied_layers(
        self, case: Case, step: Step, kill: bool
    ) -> tuple[dict[int, torch.Tensor], list[Source]]:
        answers, sources = {}, []
        for layer, query in case.queries.items():
            out = torch.full_like(case.expected[layer], -2)
            if kill and layer == _KILLED_LAYER:
                step.stage(layer, query.q, query.weights)
                self.service.kill()
                answered = step.wait(layer)
                if not answered:
                    step.compute_inline(layer, query.q, query.weights)
                sources.append(step.hand_back(layer, answered, out))
            else:
                sources.append(step.select(layer, query.q, query.weights, out=out))
            answers[layer] = out
        return answers, sources

    def _restart(self, session: Session) -> float:
        self._progress("starting the service again")
        self.service.start()
        began = time.monotonic()
        session.wait_attached(_ATTACH_SECONDS)
        return time.monotonic() - began

    def _check_survival(
        self,
        sources: list[list[Source]],
        kill_at: int,
        restart_at: int,
        detachments: int,
        attached_again: float,
    ) -> None:
        def all_from(source: Source, begin: int, end: int) -> bool:
            return all(found is source for step in sources[begin:end] for found in step)

        survived = (
            all_from(Source.SERVICE, 0, kill_at)
            and sources[kill_at][0] is Source.SERVICE
            and sources[kill_at][-1] is Source.INLINE
            and all_from(Source.INLINE, kill_at + 1, restart_at)
            and all_from(Source.SERVICE, restart_at, len(sources))
            and detachments == 1
        )
        inline = sum(found is Source.INLINE for step in sources for found in step)
        self.result.check(
            "the service killed inside a step and started again",
            survived,
            f"{inline} layers computed inline, {detachments} detachment, attached "
            f"{attached_again * 1000:.0f} ms after the service was back",
        )

    def _note_trace(self, step: Step, source: Source) -> None:
        if source is Source.SERVICE:
            self._traces.add(step.trace_id)

    def _ending(self) -> None:
        mapped = self.service.mapped_bytes()
        status = self.service.stop()
        left = list(self._sockets.iterdir()) if self._sockets.exists() else []
        self.result.check(
            "the end: nothing stays mapped, no file is left",
            mapped == 0 and status == 0 and not left,
            f"{mapped} bytes mapped, exit status {status}, {len(left)} files",
        )

    def _trace(self) -> None:
        spans = read_trace_file(self.result.trace_file).spans
        self.result.stages = stage_times(spans)
        whole = whole_traces(spans)
        self.result.check(
            "every step that the service answered is one trace over both processes",
            self._traces <= whole,
            f"{len(self._traces & whole)} of {len(self._traces)} traces have every stage",
        )
