"""Models of the Hugging Face Hub by name: their files in huggingface_hub's cache, downloaded where they are missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from megatron.core.conversion.companions import SETTINGS, TOKENIZER_FILES
from megatron.core.conversion.huggingface.formats import model_from_config
from megatron.core.conversion.huggingface.reading import CONFIG, WEIGHTS, homes_of_tensors, read_config
from megatron.core.files.remote_path import AnyPath
from megatron.errors import RESTART_MAY_HELP, CheckpointError, exit_code_of

_REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?")


def model_folder(load: AnyPath, *, flag: str, say: Callable[[str], None]) -> AnyPath:
    """The folder of the Hugging Face model ``load``: itself, or for ``ORG/NAME`` and ``ORG/NAME@REVISION`` what the
    library's cache has of that repository of the Hub.

    A folder on this machine comes first. What the cache lacks is downloaded: settings, tokenizer and one form of the
    weights, safetensors where there are both; code is not. The library's variables decide about the cache, the login
    and the network (``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``). ``flag``: names ``load`` in
    messages; ``say`` prints a line. Raises CheckpointError for a repository that is missing, gated or out of reach.
    """
    named = _REPOSITORY.fullmatch(str(load))
    if named is None or load.exists():
        return load
    try:
        from huggingface_hub import errors
    except ImportError:
        raise CheckpointError(
            f"{flag} {load} is not a folder; to load a repository of this name, install huggingface_hub: "
            "pip install huggingface_hub"
        ) from None
    try:
        folder = _downloaded(named[1], named[2])
    except CheckpointError:
        raise
    except errors.HFValidationError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{flag} {load} is neither a folder nor a repository's name: {reason}") from None
    except Exception as error:  # its HTTP library has its own exceptions, and was another one in earlier versions
        raise _refusal(error, named[1], named[2], f"{flag} {load}") from error
    say(f"{load}: revision {folder.name}, in {folder}")
    return folder


def _downloaded(repository: str, revision: str | None) -> Path:
    """The folder of one revision's needed files."""
    from huggingface_hub import snapshot_download

    def folder_with(names: Collection[str], revision: str | None) -> Path:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[CONFIG, *names]))

    indexes = [f"{single}.index.json" for single in WEIGHTS]
    folder = folder_with([*SETTINGS, *TOKENIZER_FILES, *indexes], revision)
    model_from_config(read_config(folder), where=str(folder / CONFIG))  # refuses before gigabytes are downloaded
    for single in WEIGHTS:
        names = set(homes_of_tensors(folder, single).values()) or {single}
        if any((folder_with(names, folder.name) / name).is_file() for name in names):
            return folder
    raise CheckpointError(f"{repository} holds no {' or '.join(WEIGHTS)}, whole or in parts with an index")


def _refusal(error: Exception, repository: str, revision: str | None, asked: str) -> CheckpointError:
    """What the user can do about an error of the library. ``asked``: the flag and its value."""
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    login = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(cause, errors.GatedRepoError):
        return CheckpointError(f"{asked} is a gated repository: ask for access at {hub}/{repository}, then {login}")
    if isinstance(cause, errors.RevisionNotFoundError):
        return CheckpointError(f"{asked}: {hub}/{repository} has no revision {revision or 'main'}")
    if isinstance(cause, errors.RepositoryNotFoundError):
        advice = f"correct the name or, for a private repository, {login}"
        return CheckpointError(f"{asked} is not a folder, and {hub} has no such repository: {advice}")
    if isinstance(cause, OSError) and cause.errno is not None:
        reason = f"{cause.filename or cache}: {cause.strerror}"
        return CheckpointError(f"{asked} cannot be kept in the cache: {reason}", exit_code=exit_code_of(cause))
    is_offline = isinstance(cause, errors.OfflineModeIsEnabled)
    if is_offline:
        reason = "HF_HUB_OFFLINE is set"
    elif isinstance(cause, errors.HfHubHTTPError):
        reason = f"{hub} answered with status {cause.response.status_code}"
    else:
        reason = f"{hub} cannot be reached ({type(cause).__name__}: {str(cause).partition(chr(10))[0]})"
    command = f"hf download {repository}{f' --revision {revision}' if revision else ''} --local-dir {repository}"
    return CheckpointError(
        f"{asked} is not a folder and not whole in the cache {cache}, and {reason}: run `{command}` where there is a "
        "network, and give that folder",
        exit_code=None if is_offline else RESTART_MAY_HELP,
    )
