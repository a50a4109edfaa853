"""The Hugging Face Hub: sending files to a repository, and fetching those of one."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import NamedTuple
from urllib.parse import quote

import huggingface_hub as hub  # loads its parts when they are used
from huggingface_hub import constants, errors, utils

from mpp.credentials import hide
from mpp.errors import UserError

# All that is ever fetched; nothing of it can run code.
FILES = (
    "config.json",
    "model.safetensors",
    "objective.safetensors",
    "SHA256SUMS",
    "recipe.yaml",
    "summary.json",
    "README.md",
    "figures/*.png",
)
_WEIGHTS = "model.safetensors"
_OUTSIDE = ["/*", "../*", "*/../*"]  # names that would lie beside the folder of a download
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NO_BRANCH = re.compile(r"[\s~^:?*\[\\\x00-\x1f\x7f]|\.\.|//|@\{|^[-/.]|[/.]$|\.lock$")  # man git-check-ref-format
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAMES_SHOWN = 8
_SILENCE_SECONDS = 120.0  # after which a hub that says nothing has failed; the client itself would wait for ever
_ANSWER_SECONDS = 20.0  # for a repository's listing, as something may be in the cache
_LONGEST_WAIT_SECONDS = 600.0  # that a hub may ask for


class Repository(NamedTuple):
    """A repository of the Hub: "ORG/NAME", and a branch, a tag or a commit of it, None for main."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def parse(text: str, revision: str | None = None) -> Repository:
    """A repository from "ORG/NAME" or "ORG/NAME@REVISION".

    Args:
        revision: the same as after the @, where it is told apart.

    Raises:
        UserError: it is no name of a repository, or two revisions are named.
    """
    name, at, named = text.partition("@")
    if (at and not named) or (at and revision and named != revision):
        raise UserError(hide(f"{text} and revision {revision}: name one revision, such as {name}@v1"))
    revision = named or revision
    try:
        utils.validate_repo_id(name)
    except errors.HFValidationError as error:
        what = str(error).partition(":")[0].rstrip(".")
    else:
        what = "" if "/" in name else "it has no owner"
    if what:
        raise UserError(
            hide(f"{text!r} is no repository of the Hub ({what}); write ORG/NAME or ORG/NAME@REVISION: ann/mpp-b16")
        )
    if revision is not None and _NO_BRANCH.search(revision):
        raise UserError(hide(f"{revision!r} is no revision; write a branch, a tag or a commit, such as main or v1"))
    return Repository(name, revision)


def require_write(repository: Repository, *, private: bool) -> None:
    """Makes a repository where there is none, and proves that the access token may write to it.

    Args:
        private: make it so; one that is there stays as it is.

    Raises:
        UserError: it can't be written to, and why.
    """
    _require_branch(repository)

    def check() -> None:
        api = hub.HfApi()
        _make(api, repository.name, private)
        api.auth_check(repository.name, write=True)

    _retried(check, repository, attempts=3, first_wait=1.0)


def upload(
    repository: Repository,
    files: Mapping[str, Path | bytes],
    *,
    message: str,
    private: bool = False,
    attempts: int = 5,
    first_wait: float = 1.0,
) -> str:
    """Sends files in one commit, all or none, and says where to look at them.

    Makes the repository and the branch where there is none. What may pass is tried again: a hub that is busy or out of
    reach, a broken connection, somebody else's commit in between. Large files that have arrived are not sent again.

    Args:
        files: the local file or the content of every name in the repository.
        message: of the commit.
        private: make a new repository so.
        attempts: in all.
        first_wait: seconds before the second attempt, doubled for each further one; longer where the Hub says so.

    Raises:
        UserError: a file is missing, the Hub refused, or all attempts failed.
    """
    _require_branch(repository)
    for content in files.values():
        if isinstance(content, Path) and not content.is_file():
            raise UserError(hide(f"{content} is missing, so nothing was sent to {repository}"))

    def send() -> None:
        api = hub.HfApi()
        _make(api, repository.name, private)
        if repository.revision not in (None, constants.DEFAULT_REVISION):
            api.create_branch(repository.name, branch=repository.revision, exist_ok=True)
        # Made anew for each attempt: they remember what the Hub held, which a commit whose answer was lost has changed.
        additions = [hub.CommitOperationAdd(name, content) for name, content in files.items()]
        api.create_commit(
            repository.name, additions, commit_message=hide(message), revision=repository.revision, repo_type="model"
        )

    _retried(send, repository, attempts, first_wait)
    place = f"{constants.ENDPOINT}/{repository.name}"
    return f"{place}/tree/{quote(repository.revision, safe='')}" if repository.revision else place


def fetch(repository: Repository, *, files: Iterable[str] = FILES, warn: Callable[[str], None] | None = None) -> Path:
    """A folder of the local cache with those files of a repository that have the names asked for.

    Without a connection it is what was fetched before, if that is whole.

    Args:
        files: names and patterns.
        warn: takes what to know where the Hub could not be reached and the cache was taken.

    Raises:
        UserError: there is no such repository, revision or model.safetensors, or the files can't be had.
    """
    files = list(files)

    def download(local: bool = False) -> Path:
        return Path(
            hub.snapshot_download(
                repository.name,
                revision=repository.revision,
                allow_patterns=files,
                ignore_patterns=_OUTSIDE,
                local_files_only=local,
            )
        )

    with _calm():
        try:
            # Asked for first, because the download takes an older one from the cache for many faults, and says nothing.
            found = hub.HfApi().model_info(repository.name, revision=repository.revision, timeout=_ANSWER_SECONDS)
            if _WEIGHTS in files:
                _require_weights(repository, [file.rfilename for file in found.siblings or []])
            folder = download()
            if warn is not None and folder.name != found.sha:
                warn(f"warning: {repository} is taken at commit {folder.name[:8]}; the Hub had just named {found.sha}")
        except UserError:
            raise
        except Exception as error:
            if not _out_of_reach(error):
                raise _explained(error, repository) from None
            try:
                folder = download(local=True)
            except Exception:
                raise _explained(error, repository, "is not whole in the cache") from None
            if warn is not None and not constants.HF_HUB_OFFLINE:
                why = f"{constants.ENDPOINT} can't be reached ({_told(error)})"
                warn(_hidden(f"warning: {why}; {repository} is taken from the cache, commit {folder.name[:8]}"))
    if _WEIGHTS in files and not (folder / _WEIGHTS).is_file():
        raise UserError(f"{repository}: {_WEIGHTS} is not in the cache; fetch it once with a connection to the Hub")
    return folder


def _require_branch(repository: Repository) -> None:
    if repository.revision and _COMMIT.fullmatch(repository.revision):
        raise UserError(f"{repository}: a commit can't be sent to; name a branch")


def _make(api: hub.HfApi, name: str, private: bool) -> None:
    if constants.HF_HUB_OFFLINE:
        raise errors.OfflineModeIsEnabled
    if hub.get_token() is None:
        raise errors.LocalTokenNotFoundError
    # Not False, because an organisation may make its repositories private by itself.
    api.create_repo(name, private=private or None, exist_ok=True)


def _require_weights(repository: Repository, names: list[str]) -> None:
    if _WEIGHTS in names:
        return
    pickled = [name for name in names if name.endswith(_PICKLED)]
    if pickled and not any(name.endswith(".safetensors") for name in names):
        raise UserError(
            f"{repository} holds pickled weights only ({_listed(pickled)}), which are not read, for they can run code; "
            "it has to have a model.safetensors"
        )
    raise UserError(f"{repository} has no {_WEIGHTS}; it holds {_listed(names) or 'nothing'}")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return hide(", ".join(names[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")


@contextmanager
def _calm() -> Iterator[None]:
    """Lets the client show bars in a terminal only, and say nothing of its own tries, whose addresses are signed."""
    logging, session = utils.logging, hub.get_session()
    patience, session.timeout = session.timeout, _SILENCE_SECONDS
    level = logging.get_verbosity()
    if level == logging.WARNING:  # whoever asked for more gets it
        logging.set_verbosity_error()
    hides_bars = constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not (
        sys.stderr.isatty() or utils.are_progress_bars_disabled()
    )
    if hides_bars:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        session.timeout = patience
        logging.set_verbosity(level)
        if hides_bars:
            utils.enable_progress_bars()


def _retried(action: Callable[[], None], repository: Repository, attempts: int, first_wait: float) -> None:
    for attempt in range(1, attempts + 1):
        try:
            with _calm():
                return action()
        except Exception as error:
            if not _may_pass(error):
                raise _explained(error, repository, writes=True) from None
            if attempt == attempts:
                raise _explained(error, repository, f"tried {attempts} times", writes=True) from None
            sleep(max(first_wait * 2 ** (attempt - 1), _asked_wait(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what led to it: the client wraps what befell a file's upload."""
    while error is not None:
        yield error
        error = error.__cause__


def _response(error: Exception) -> errors.Response | None:
    return next((cause.response for cause in _chain(error) if isinstance(cause, errors.HfHubHTTPError)), None)


def _out_of_reach(error: Exception) -> bool:
    """Whether the Hub gave no answer, or none that says anything of the repository."""
    response = _response(error)
    if response is not None:
        return response.status_code in (408, 429) or response.status_code >= 500
    return any(isinstance(cause, errors.HTTPError | ConnectionError | TimeoutError) for cause in _chain(error))


def _may_pass(error: Exception) -> bool:
    response = _response(error)
    if response is not None:
        # 403 of a storage is an address that was signed for a while only; the next attempt gets another.
        expired = response.status_code == 403 and not str(response.request.url).startswith(constants.ENDPOINT)
        return _out_of_reach(error) or response.status_code in (409, 412) or expired
    causes = list(_chain(error))
    if any(isinstance(cause, errors.OfflineModeIsEnabled | FileNotFoundError) for cause in causes):
        return False
    # hf_xet raises RuntimeError for a network's faults, and an answer that a proxy gave is no JSON.
    unreadable = type(causes[-1]).__name__ == "JSONDecodeError"
    return _out_of_reach(error) or unreadable or type(causes[-1]) is RuntimeError


def _asked_wait(error: Exception) -> float:
    """Seconds that the Hub asks to wait, 0 where it does not."""
    response = _response(error)
    if response is None:
        return 0.0
    asked = re.fullmatch(r"\d+", response.headers.get("Retry-After", "")) or re.search(
        r"(?<=;t=)\d+", response.headers.get("RateLimit", "")
    )
    return min(float(asked.group()), _LONGEST_WAIT_SECONDS) if asked else 0.0


def _told(error: Exception) -> str:
    """What went wrong in a few words, without the address, which may be signed."""
    response = _response(error)
    if response is None:
        cause = list(_chain(error))[-1]
        line = str(cause).strip().partition("\n")[0]
        return f"{type(cause).__name__}: {line}" if line else type(cause).__name__
    said = (
        next((cause.server_message for cause in _chain(error) if isinstance(cause, errors.HfHubHTTPError)), None) or ""
    )
    return f"{response.status_code} {response.reason_phrase}" + (f": {said.partition(chr(10))[0]}" if said else "")


def _explained(error: Exception, repository: Repository, addition: str = "", writes: bool = False) -> UserError:
    """An error of the Hub's client as one message that says what to do; without any access token."""
    where, hub_url, causes = str(repository), constants.ENDPOINT, list(_chain(error))
    tokens = f"{hub_url}/settings/tokens"
    response = _response(error)
    status = None if response is None else response.status_code
    text = f"{where}: {_told(error)}"
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes):
        what = f"{where} {addition}" if addition else where
        text = f"{what}, and the Hub is not asked (HF_HUB_OFFLINE=1); unset HF_HUB_OFFLINE"
    elif any(isinstance(cause, errors.LocalTokenNotFoundError) for cause in causes):
        text = f"{where}: there is no access token; set HF_TOKEN, or `hf auth login`. One is made at {tokens}"
    elif any(isinstance(cause, errors.GatedRepoError) for cause in causes):
        text = f"{where} is gated; ask for access at {hub_url}/{repository.name}, with the account of your access token"
    elif any(isinstance(cause, errors.RevisionNotFoundError) for cause in causes):
        text = f"{repository.name} has no revision {repository.revision or 'main'}; name a branch, a tag or a commit"
    elif status == 401 and _token() is not None:
        text = (
            f"{where}: the Hub refused the access token (401); it is wrong, or no longer valid. Make one at {tokens}, "
            "and set HF_TOKEN, or `hf auth login`"
        )
    elif status in (401, 404):
        text = (
            f"{where}: the Hub has no such repository, or it is private and there is no access token that may read it; "
            "mend the name, or set HF_TOKEN, or `hf auth login`"
        )
    elif status == 403 and writes and not _may_pass(error):
        text = f"{where}: {_missing_right(repository)} ({_told(error)})"
    elif _may_pass(error):
        told = f"{_told(error)}; {addition}" if addition else _told(error)
        mend = "try again later" if response is not None else "look at the connection, HF_ENDPOINT and the proxy"
        text = f"{where}: {hub_url} can't be reached, or is busy ({told}); {mend}"
    return UserError(_hidden(text))


def _missing_right(repository: Repository) -> str:
    """Why a token may not write, as far as the Hub tells."""
    owner, _, name = repository.name.partition("/")
    try:
        account = hub.HfApi().whoami()
        user, role = account["name"], account["auth"]["accessToken"]["role"]
    except Exception:  # it only explains another error
        return "the access token may not write there"
    if role == "read":
        return f"the access token may only read; make one of the type Write at {constants.ENDPOINT}/settings/tokens"
    if role == "fineGrained":
        settings = f"{constants.ENDPOINT}/settings/tokens"
        return f"the fine-grained access token has no right to write to the repositories of {owner}; see {settings}"
    return f"{user} may not write in {owner}; ask its administrators, or name {user}/{name}"


def _token() -> str | None:
    try:
        return hub.get_token()
    except Exception:  # some workflows trade theirs over the network
        return None


def _hidden(text: str) -> str:
    token = _token()
    return hide(text.replace(token, "…") if token else text)
