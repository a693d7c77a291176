"""What s3fs, botocore and the server say, in our tree."""

from __future__ import annotations

from collections.abc import Iterable

# By s3fs's own import, since botocore comes with it.
from s3fs.core import S3_RETRYABLE_ERRORS, botocore

from fsdp_ckpt.errors import (
    AlreadyCommittedError,
    CheckpointError,
    NotFoundError,
    StorageError,
    describe,
)
from fsdp_ckpt.storage import retry

__all__ = ["is_transient", "to_our_tree"]

_LOST = (*S3_RETRYABLE_ERRORS, botocore.exceptions.ConnectionError)


def is_transient(error: BaseException) -> bool:
    """Tell whether a request that failed may succeed later."""
    # Botocore counts it among the lost connections, but a certificate stays wrong.
    if isinstance(error, botocore.exceptions.SSLError):
        return False
    return retry.is_transient(error, _LOST)


def to_our_tree(
    error: Exception, where: str, key: str, *, secrets: Iterable[str] = ()
) -> CheckpointError:
    """Return the error of our tree that says what ``error`` does.

    Args:
        error: Of s3fs, botocore or Python.
        where: URL of the object or folder concerned.
        key: As the caller wrote it.
        secrets: What must not be in a message.
    """
    answer = retry.answer_of(error)
    if answer is None:
        text = describe(error)
    elif answer.code == "NoSuchBucket":
        text = "no such bucket"
    elif answer.status == 404:
        return NotFoundError(f"{where}: not found", key=key)
    elif answer.status == 412:
        return AlreadyCommittedError(f"{where}: exists already", key=key)
    elif answer.status == 416:
        text = "shorter than expected: it ends before the bytes asked for"
    else:
        # An answer without a body, as to a HEAD request, has the status for a code.
        code = "" if answer.code == str(answer.status) else f"{answer.code}, "
        text = f"{code}HTTP {answer.status}: {answer.message}"
        if answer.status in (401, 403):
            text += "; check the credentials, the endpoint, and what they are allowed to do"
    text = "; ".join([text, *getattr(error, "__notes__", ())])
    for secret in secrets:
        text = text.replace(secret, "***")
    return StorageError(f"{where}: {text}", retryable=is_transient(error), key=key)
