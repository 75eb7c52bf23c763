"""llama.cpp as a method of benchmarks: greedy decoding of a checkpoint's own GGUF file."""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerskip.api.arguments import end_tokens
from layerskip.api.loading import Loaded
from layerskip.bench.batches import PromptBatch
from layerskip.bench.llama_process import serve
from layerskip.bench.methods import Clock, Decoded, Method, Task
from layerskip.files.environment import cache_folder
from layerskip.files.writing import replacing

PACKAGE = "llama-cpp-python==0.3.36"
LLAMAS = ("llama.cpp", "llama.cpp-flash")
"""Methods without and with flash attention."""
_WIDE = {
    "float32": ("LLAMA_FTYPE_ALL_F32", "F32"),
    "bfloat16": ("LLAMA_FTYPE_MOSTLY_BF16", "BF16"),
    "float16": ("LLAMA_FTYPE_MOSTLY_F16", "F16"),
}


class LlamaCpp:
    """llama.cpp with its own greedy sampler, through llama-cpp-python, in a process of its own."""

    kind = "llama.cpp"
    one_row = True

    def __init__(
        self, name: str, file: Path, options: dict[str, Any], task: Task, ends: frozenset[int]
    ) -> None:
        self.name, self.task = name, task
        spawn = multiprocessing.get_context("spawn")  # a fork would have our threads' locks
        self._pipe, theirs = spawn.Pipe()
        arguments = (theirs, str(file), options, ends)
        self._process = spawn.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is noticed

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "package": PACKAGE}

    def decode(
        self, batch: PromptBatch, repeat: int, clock: Clock, max_new_tokens: int | None = None
    ) -> Decoded:
        limit = max_new_tokens or self.task.max_new_tokens
        self._pipe.send((batch.input_ids[0].tolist(), limit))
        self._answer()
        first = clock()
        return Decoded([self._answer()], first, [1])

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise OSError(f"the process of {self.name} ended with exit code {code}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def open_llama(loaded: Loaded, task: Task, names: Sequence[str], context: int) -> list[Method]:
    """Open the only GGUF file in a checkpoint's folder, converted once to the model's dtype.

    It runs on the model's threads. A model that is a GGUF file itself is used unchanged.

    Raises:
        ValueError: llama.cpp is not installed, texts are sampled, there is not exactly one GGUF
            file, or llama.cpp does not have the dtype.
    """
    if task.do_sample:
        raise ValueError(f"{names[0]} is compared greedily; leave --do-sample out")
    if importlib.util.find_spec("llama_cpp") is None:
        raise ValueError(
            f"llama.cpp is not installed: `pip install {PACKAGE}` compiles it, in minutes"
        )
    llama_cpp: Any = importlib.import_module("llama_cpp")
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    own = Path(loaded.name)
    file = own if own.suffix == ".gguf" else _widened(llama_cpp, loaded, dtype)
    options = dict.fromkeys(("n_threads", "n_threads_batch"), torch.get_num_threads())
    options |= {"n_ctx": context, "verbose": False}
    if dtype == "float32":  # including keys and values, which would be in half precision
        options |= {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    ends = end_tokens(loaded.model)
    return [
        LlamaCpp(name, file, {**options, "flash_attn": name != "llama.cpp"}, task, ends)
        for name in names
    ]


def _widened(llama_cpp: Any, loaded: Loaded, dtype: str) -> Path:
    """The only GGUF file in a checkpoint's folder, converted to the model's dtype."""
    files = [] if loaded.folder is None else sorted(loaded.folder.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"there must be one .gguf in the folder of {loaded.name}, got {len(files)}; "
            "`make checkpoints` leaves it there"
        )
    if dtype not in _WIDE:
        raise ValueError(f"--dtype must be one of {', '.join(_WIDE)} with llama.cpp, got {dtype}")
    kind, suffix = _WIDE[dtype]
    wide = cache_folder() / "llama.cpp" / f"{files[0].stem}-{suffix}.gguf"
    if not wide.exists():
        wide.parent.mkdir(parents=True, exist_ok=True)
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.allow_requantize = getattr(llama_cpp, kind), True
        with replacing(wide) as part:
            if llama_cpp.llama_model_quantize(str(files[0]).encode(), str(part).encode(), how):
                raise OSError(f"llama.cpp cannot widen {files[0]} to {suffix}")
    return wide
