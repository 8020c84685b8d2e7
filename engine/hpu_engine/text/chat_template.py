"""A conversation to the prompt text its model was trained on, by the checkpoint's own template. Torch-free.

The template is a program from somewhere, so it runs in a process of its own (`template_process`), with bounds on time
and memory; one that goes past them is ended, and the next conversation gets a new process. One thread speaks to the
process, one conversation after the other, so a template that is slow holds up chats alone. The process has a low
priority: where the processors are busy, the model's steps come first.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import BoundedSemaphore
from typing import Any

import msgspec
import pydantic_core

COMMAND = (sys.executable, "-P", "-s", "-m", "hpu_engine.text.template_process")
START_SECONDS = 20.0
"""For the process to come up, on a machine that is busy with a model."""
COMPILE_SECONDS = 10.0
"""For the template, once: before that the server has no model to serve."""
RENDER_SECONDS = 1.0
"""For one conversation, and a second more for each `BYTES_A_SECOND` that it has. Most take less than a millisecond."""
BYTES_A_SECOND = 4 * 1024 * 1024
NICENESS = 10
MOST_WAITING = 4096
"""Conversations behind the one that is rendered."""
REPLY_LIMIT_BYTES = 128 * 1024 * 1024
_INHERITED = ("PATH", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")
"""Variables the process gets: none that holds a secret."""


class TemplateRefused(Exception):
    """The template cannot be used at all, or does not accept this conversation."""


class TemplateBusy(Exception):
    """Too many conversations wait for the template."""


class _Reply(msgspec.Struct, frozen=True):
    """See `template_process.Reply`."""

    text: str | None = None
    own_words: str | None = None
    limit: str | None = None
    problem: str | None = None


class ChatTemplate:
    """`special_tokens` (`bos_token`, `eos_token`, ...) are what templates expect by name.

    `unusable` says why the template cannot be used, where that is known without compiling it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, unusable: str | None = None) -> None:
        self._opening = pydantic_core.to_json({"source": source, "special_tokens": special_tokens}) + b"\n"
        self._unusable = unusable
        self._process: _Process | None = None
        self._thread = ThreadPoolExecutor(1, "chat-template")
        self._places = BoundedSemaphore(MOST_WAITING)
        self.rendered_at = 0.0
        """When the last conversation was rendered, by the monotonic clock."""

    def check(self) -> str | None:
        """Starts the process and compiles the template; the sentence that says why it cannot be used, if it cannot."""
        try:
            self._thread.submit(self._open).result()
        except TemplateRefused as refused:
            return str(refused)
        except TemplateBusy:
            pass  # the first conversation tries again
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt. Raises `TemplateRefused` with the template's own words when it does not take the messages."""
        return self.start(
            messages, add_generation_prompt=add_generation_prompt, variables=variables, documents=documents
        ).result()

    def start(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        documents: Sequence[Mapping[str, Any]] | None,
    ) -> Future[str]:
        """`render` without waiting for it. Raises `TemplateBusy`."""
        if not self._places.acquire(blocking=False):
            raise TemplateBusy
        order = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "variables": variables or {},
            "documents": documents,
        }
        future = self._thread.submit(self._render, order)
        future.add_done_callback(lambda _: self._places.release())
        return future

    # --- in the thread

    def _render(self, order: Mapping[str, Any]) -> str:
        line = pydantic_core.to_json(order, inf_nan_mode="constants") + b"\n"
        reply = self._ask(self._open(), line, RENDER_SECONDS + len(line) / BYTES_A_SECOND)
        if reply.text is not None:
            self.rendered_at = time.monotonic()
            return reply.text
        if reply.own_words is not None:
            raise TemplateRefused(reply.own_words or "the model's chat template refuses these messages")
        if reply.limit is not None:
            self._close()
            raise TemplateRefused(f"the model's chat template cannot be used on these messages: {reply.limit}")
        raise TemplateRefused(f"the model's chat template does not accept these messages: {reply.problem}")

    def _open(self) -> _Process:
        """The process with the template in it. Raises `TemplateRefused`, from then on at once."""
        if self._unusable is not None:
            raise TemplateRefused(self._unusable)
        if self._process is not None and self._process.popen.poll() is not None:
            self._close()  # ended from outside, and not by a conversation
        if self._process is None:
            self._process = self._start()
            try:
                reply = self._ask(self._process, self._opening, COMPILE_SECONDS)
            except TemplateRefused as refused:
                self._unusable = str(refused)
                raise
            if (problem := reply.problem or reply.limit) is not None:
                self._close()
                self._unusable = f"the model's chat template does not compile ({problem}); use /v1/completions"
                raise TemplateRefused(self._unusable)
        return self._process

    def _start(self) -> _Process:
        """A process that is up. Raises `TemplateBusy` where the machine has none to give."""
        try:
            process = _Process.start()
        except OSError:
            raise TemplateBusy from None
        try:
            process.exchange(b"", START_SECONDS)
        except (TimeoutError, _Ended, OSError):
            process.end()
            raise TemplateBusy from None
        return process

    def _ask(self, process: _Process, line: bytes, seconds: float) -> _Reply:
        try:
            return msgspec.json.decode(process.exchange(line, seconds), type=_Reply)
        except TimeoutError:
            problem = f"took longer than {seconds:.2g} s and was stopped"
        except (_Ended, OSError, msgspec.DecodeError):
            problem = "ended its process"
        self._close()
        raise TemplateRefused(f"the model's chat template {problem}; use /v1/completions")

    def _close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Ended(Exception):
    """The process has closed its end, or says more than it may."""


@dataclass
class _Process:
    """The process and its pipes."""

    popen: subprocess.Popen[bytes]

    @classmethod
    def start(cls) -> _Process:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        popen = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal is for the server
        )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, popen.pid, NICENESS)
        assert popen.stdin is not None
        assert popen.stdout is not None
        os.set_blocking(popen.stdin.fileno(), False)
        os.set_blocking(popen.stdout.fileno(), False)
        return cls(popen)

    def exchange(self, line: bytes, seconds: float) -> bytes:
        """The reply to `line`. Raises TimeoutError and `_Ended`."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        to, of = self.popen.stdin.fileno(), self.popen.stdout.fileno()
        waiting = select.poll()
        waiting.register(of, select.POLLIN)
        if line:
            waiting.register(to, select.POLLOUT)
        unsent, reply = memoryview(line), bytearray()
        until = time.monotonic() + seconds
        while not reply.endswith(b"\n"):
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError
            for descriptor, _ in waiting.poll(left * 1000):
                if descriptor == to:
                    unsent = unsent[os.write(to, unsent) :]
                    if not unsent:
                        waiting.unregister(to)
                else:
                    reply += (piece := os.read(of, 1 << 20))
                    if not piece or len(reply) > REPLY_LIMIT_BYTES:
                        raise _Ended
        return bytes(reply)

    def end(self) -> None:
        self.popen.kill()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        self.popen.wait()
