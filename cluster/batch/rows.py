"""The rows of a batch's output and of its error file."""

from typing import Any

from cluster.batch.lines import BadLine, BatchLine
from cluster.batch.sender import Answer


def answer_row(batch: str, line: BatchLine, answer: Answer) -> dict[str, Any]:
    """The row of a line that was answered, in OpenAI's format. `batch` is a name for the whole of them."""
    return {
        "id": f"batch_req_{batch}_{line.number}",
        "custom_id": line.custom_id,
        "response": {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body},
        "error": None,
    }


def refusal_row(batch: str, line: BatchLine, answer: Answer) -> dict[str, Any]:
    """The row of a line that the service refused: as an answer, with the reason and the line's number."""
    error = answer.body["error"]
    reason = {"code": error.get("code") or error.get("type"), "message": error.get("message"), "line": line.number}
    return answer_row(batch, line, answer) | {"error": reason}


def bad_line_row(batch: str, line: BadLine) -> dict[str, Any]:
    """The row of a line that was no request."""
    return {
        "id": f"batch_req_{batch}_{line.number}",
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": "invalid_line", "message": line.message, "line": line.number},
    }
