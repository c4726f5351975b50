"""The real scheduler and the reference behind the seam that the workload loop drives."""

from reference_scheduler import ReferenceScheduler
from scheduler_workloads import RequestSpec, Workload

from scheduler.plan import RequestOutput, StepPlan, StepResult
from scheduler.request import Request, RequestRefused, RequestStatus
from scheduler.scheduler import Scheduler


class RealEngine:
    def __init__(self, load: Workload) -> None:
        self.scheduler = Scheduler(load.config, load.num_blocks)

    def add(self, spec: RequestSpec) -> bool:
        try:
            self.scheduler.add_request(
                Request(
                    request_id=spec.request_id,
                    prompt_token_ids=spec.prompt,
                    sampling_params=spec.params,
                    arrival_time=float(spec.arrival),
                    priority=spec.priority,
                    lora_id=spec.lora_id,
                    cache_salt=spec.cache_salt,
                    has_grammar=spec.has_grammar,
                    output_token_ids=spec.output,
                )
            )
        except RequestRefused:
            return False
        return True

    def finish(self, request_id: str, aborted: bool) -> None:
        status = RequestStatus.FINISHED_ABORTED if aborted else RequestStatus.FINISHED_STOPPED
        self.scheduler.finish_request(request_id, status)

    def mark_grammar_ready(self, request_id: str) -> None:
        self.scheduler.mark_grammar_ready(request_id)

    def hold(self, request_ids: set[str]) -> None:
        self.scheduler.hold(request_ids)

    def end_epoch(self) -> None:
        self.scheduler.end_epoch()

    def schedule(self) -> StepPlan | None:
        return self.scheduler.schedule()

    def update_from_result(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        return self.scheduler.update_from_result(plan, result)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()


class ReferenceEngine:
    def __init__(self, load: Workload) -> None:
        self.scheduler = ReferenceScheduler(load.config, load.num_blocks)

    def add(self, spec: RequestSpec) -> bool:
        return self.scheduler.add_request(
            spec.request_id,
            spec.prompt,
            spec.params,
            spec.arrival,
            spec.priority,
            spec.lora_id,
            spec.cache_salt,
            spec.has_grammar,
            spec.output,
        )

    def finish(self, request_id: str, aborted: bool) -> None:
        self.scheduler.finish_request(request_id)

    def mark_grammar_ready(self, request_id: str) -> None:
        self.scheduler.mark_grammar_ready(request_id)

    def hold(self, request_ids: set[str]) -> None:
        self.scheduler.hold(request_ids)

    def end_epoch(self) -> None:
        self.scheduler.end_epoch()

    def schedule(self) -> StepPlan | None:
        return self.scheduler.schedule()

    def update_from_result(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        return self.scheduler.update_from_result(plan, result)

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.requests)
