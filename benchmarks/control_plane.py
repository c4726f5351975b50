"""What a step costs besides the model: N decodes from schedule() to the bytes that leave for the front end, one core.

    python -m benchmarks control_plane

Runs the engine's and the rank's own code on each plan in turn, without sockets, processes or a model, and
prints each stage's median in milliseconds. Exits with 1 if plan encoding and decoding, batch building and
the handling of results take more than 1 ms together at 64 decodes.
"""

import argparse
import gc
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from itertools import pairwise

import torch

from benchmarks.summary import table
from cluster.engine.step_log import StepLog
from cluster.links.messages import GenerateSummary, TokenBatch
from cluster.links.token_link import encode_message
from cluster.links.token_sender import RequestTokens
from cluster.metrics.engine import EngineMetrics
from scheduler.config import SchedulerConfig
from scheduler.plan import RequestOutput, StepPlan, StepResult
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from workers.batch import Batch, build
from workers.device import HostCopies
from workers.model_runner import ModelRunner, PendingStep
from workers.request_state import RequestState
from workers.sampler import SampledTokens
from workers.tensor_parallel import TensorParallel
from workers.vocab import VocabShards
from workers.wire import decode_plan, decode_result, encode

SIZES = (1, 16, 64, 256)
NUM_STEPS = 300
PROMPT_TOKENS = 64
BLOCK_SIZE = 16
VOCAB_SIZE = 49152
CHECKED_SIZE = 64
LIMIT_MS = 1.0

STAGES = (
    "schedule",
    "encode plan",
    "decode plan",
    "apply plan",
    "build batch",
    "place tokens",
    "report",
    "encode result",
    "decode result",
    "update",
    "publish",
    "metrics",
    "step log",
)
LIMITED = (
    "encode plan",
    "decode plan",
    "apply plan",
    "build batch",
    "report",
    "encode result",
    "decode result",
    "update",
)
CPU = torch.device("cpu")


class NoModel:
    """Stands where the decoder is; never called."""

    def forward(self, *_: object) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Loop:
    """An engine's loop and its rank's, in one process, for `num_decodes` requests that decode for ever."""

    def __init__(self, num_decodes: int) -> None:
        max_model_len = PROMPT_TOKENS + BLOCK_SIZE + NUM_STEPS + 8
        config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_batched_tokens=num_decodes * (PROMPT_TOKENS + BLOCK_SIZE),
            max_num_seqs=num_decodes,
            block_size=BLOCK_SIZE,
        )
        self.scheduler = Scheduler(config, num_blocks=num_decodes * (max_model_len // BLOCK_SIZE + 2))
        self._state = RequestState(num_decodes, max_model_len, BLOCK_SIZE, CPU)
        self._runner = ModelRunner(NoModel(), [], self._state, VocabShards(TensorParallel(device=CPU), [VOCAB_SIZE]))
        self._metrics = EngineMetrics()
        self._log = StepLog(4096)
        self._sent: dict[str, RequestTokens] = {}
        params = SamplingParams(max_tokens=max_model_len, temperature=0.0, stop_token_ids=(0, 1))
        for index in range(num_decodes):
            # Lengths differ, so that in every step a sixteenth of the requests takes a new block.
            prompt = [index + 2] * (PROMPT_TOKENS + index % BLOCK_SIZE)
            request_id = uuid.uuid4().hex
            self.scheduler.add_request(Request(request_id, prompt, params))
            self._metrics.add(request_id, len(prompt), time.time())
            self._sent[request_id] = RequestTokens(request_id, _ignore)

    def step(self) -> list[float]:
        """Seconds of each of STAGES in one step."""
        marks = [time.perf_counter()]

        def mark() -> None:
            marks.append(time.perf_counter())

        plan = self.scheduler.schedule()
        assert plan is not None
        mark()
        payload = encode(plan)
        mark()
        received = decode_plan(payload)
        mark()
        self._state.apply_plan(received)
        mark()
        batch = build(received, self._state)
        mark()
        sampled = self._place(batch)
        mark()
        result = self._runner.collect(PendingStep(received, batch, sampled, None, HostCopies(CPU), marks[0]))
        mark()
        payload = encode(result)
        mark()
        reported = decode_result(payload)
        mark()
        outputs = self.scheduler.update_from_result(plan, reported)
        mark()
        self._publish(outputs)
        mark()
        self._metrics.observe(plan, reported, outputs, self.scheduler.stats(), marks[0], marks[-1])
        mark()
        self._record(plan, reported, outputs, marks[0], marks[-1])
        mark()
        return [after - before for before, after in pairwise(marks)]

    def _place(self, batch: Batch) -> SampledTokens:
        """What follows sampling: tokens into the mirror, and its counts."""
        rows = batch.sampling_rows
        token_ids = torch.full((len(rows),), 7)
        self._state.place_sampled(rows.slots, rows.context_lens, token_ids)
        self._state.apply_result(batch.slots, batch.seq_lens)
        return SampledTokens(token_ids, torch.ones(len(rows), dtype=torch.bool), None, rows.rows[:0])

    def _publish(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._sent[output.request_id].append(output)
        encode_message(TokenBatch(list(outputs)))

    def _record(
        self, plan: StepPlan, result: StepResult, outputs: Sequence[RequestOutput], sent_at: float, received_at: float
    ) -> None:
        self._log.record(
            plan, result, outputs, sent_ahead=False, sent_at=sent_at, received_at=received_at, stage_seconds={}
        )


def _ignore(summary: GenerateSummary) -> None:
    """Nobody waits for the ends of these requests."""


def measure(num_decodes: int) -> dict[str, float]:
    """Median milliseconds of each stage, and of "sum" and "limited", the whole step and the part with a limit."""
    loop = Loop(num_decodes)
    with torch.inference_mode():
        loop.step()  # computes the prompts
        assert len(loop.scheduler.running) == num_decodes
        gc.collect()
        gc.freeze()  # as the engine does after start-up
        steps = [dict(zip(STAGES, loop.step(), strict=True)) for _ in range(NUM_STEPS)]
        gc.unfreeze()
    columns = {stage: [step[stage] for step in steps] for stage in STAGES}
    columns["limited"] = [sum(step[stage] for stage in LIMITED) for step in steps]
    columns["sum"] = [sum(step.values()) for step in steps]
    return {stage: 1e3 * statistics.median(seconds) for stage, seconds in columns.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when the target is missed."""
    argparse.ArgumentParser(
        prog="control_plane", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args(argv)
    torch.set_num_threads(1)
    found = {size: measure(size) for size in SIZES}
    rows = [[stage, *(f"{found[size][stage]:.3f}" for size in SIZES)] for stage in (*STAGES, "sum", "limited")]
    print(table(["ms, by number of decodes", *map(str, SIZES)], rows))
    limited = found[CHECKED_SIZE]["limited"]
    if limited > LIMIT_MS:
        print(f"{CHECKED_SIZE} decodes take {limited:.3f} ms, above {LIMIT_MS} ms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
