"""Where a setting comes from, which one wins, and what is said about a wrong one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpu_engine.contract import ExitCode, FailureReason, TerminationMessage
from hpu_engine.settings.serve import ServeSettings, SettingsError, load_settings, unknown_variables

FLAGS = [
    *("--model", "--device", "--host", "--port", "--control-port", "--served-model-name", "--dtype", "--max-model-len"),
    *("--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--kv-cache-memory", "--num-kv-blocks"),
    *("--lame-duck-seconds", "--drain-seconds", "--termination-log", "--allowed-origins"),
    *("--tensor-parallel-size", "--data-parallel-size", "--expert-parallel-size", "--exact"),
]
"""What users and the operator write: none of these may be renamed."""


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: /file\nmax-num-seqs: 3\nport: 3\nblock_size: 3\n")
    monkeypatch.setenv("HPU_ENGINE_PORT", "2")
    monkeypatch.setenv("HPU_ENGINE_MAX_NUM_SEQS", "2")
    settings = load_settings({"max_num_seqs": "1", "model": None}, file)
    assert (settings.max_num_seqs, settings.port, settings.block_size, settings.control_port) == (1, 2, 3, 8001)
    assert settings.model == Path("/file")


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({}, "--model is required"),
        ({"model": "m", "port": "70000"}, "--port: "),
        ({"model": "m", "port": "abc"}, "it was 'abc'"),
        ({"model": "m", "dtype": "int3"}, "'auto', 'bfloat16' or 'float32'"),
        ({"model": "m", "device": "abacus"}, "--device: "),
        ({"model": "m", "max_num_seqs": "0"}, "--max-num-seqs: "),
        ({"model": "m", "drain_seconds": "nan"}, "--drain-seconds: "),
        ({"model": "m", "lame_duck_seconds": "-1"}, "--lame-duck-seconds: "),
        ({"model": "m", "num_kv_blocks": "0"}, "--num-kv-blocks: "),
    ],
)
def test_a_wrong_setting_is_named_by_its_flag(flags: dict[str, str], what: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings(flags)
    assert what in str(raised.value)


@pytest.mark.parametrize("size", ["tensor", "data", "expert"])
def test_a_parallel_size_other_than_one_is_refused_in_a_sentence(size: str) -> None:
    with pytest.raises(SettingsError, match=f"--{size}-parallel-size: this engine runs one worker per pod for now"):
        load_settings({"model": "m", f"{size}_parallel_size": "2"})


def test_a_wrong_variable_and_an_unknown_key_say_where_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPU_ENGINE_PORT", "x")
    with pytest.raises(SettingsError, match="--port from HPU_ENGINE_PORT"):
        load_settings({"model": "m"})
    monkeypatch.delenv("HPU_ENGINE_PORT")
    file = tmp_path / "settings.yaml"
    file.write_text("model: m\nprot: 9\n")
    with pytest.raises(SettingsError, match=r"unknown setting `prot` in .*settings.yaml"):
        load_settings({}, file)
    file.write_text("- a list\n")
    with pytest.raises(SettingsError, match="mapping of settings"):
        load_settings({}, file)
    with pytest.raises(SettingsError, match="cannot be read as YAML"):
        load_settings({}, tmp_path / "missing.yaml")


def test_origins_are_spelled_as_browsers_spell_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def origins(**flags: str) -> tuple[str, ...]:
        return load_settings({"model": "m", **flags}).allowed_origins

    assert origins() == ()
    assert origins(allowed_origins="*") == ("*",)
    expected = ("https://a.example", "http://[::1]:3000")
    assert origins(allowed_origins="https://A.example:443/, http://[::1]:3000") == expected
    monkeypatch.setenv("HPU_ENGINE_ALLOWED_ORIGINS", "https://b.example")
    assert origins() == ("https://b.example",)
    file = tmp_path / "settings.yaml"
    file.write_text("model: m\nallowed-origins: [https://c.example, 'https://d.example:8443']\n")
    monkeypatch.delenv("HPU_ENGINE_ALLOWED_ORIGINS")
    assert load_settings({}, file).allowed_origins == ("https://c.example", "https://d.example:8443")
    for wrong in ("a.example", "https://a.example/path", "null", "https://a.example:99999"):
        with pytest.raises(SettingsError, match=r"--allowed-origins: an origin is \* or scheme://host"):
            origins(allowed_origins=wrong)


def test_workers_get_the_settings_that_concern_them() -> None:
    given = {"model": "/m", "kv_cache_memory": "1000", "num_kv_blocks": "7", "dtype": "float32", "compile_cache": "/c"}
    sent = load_settings(given).engine_config()
    assert (sent.model, sent.kv_cache_memory_bytes, sent.num_kv_blocks, sent.dtype) == ("/m", 1000, 7, "float32")
    assert (sent.compile_cache, sent.kernels) == ("/c", "auto")


def run_command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpu_engine.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"COLUMNS": "200", "PATH": "", **environment}
    )


def test_help_lists_every_setting() -> None:
    shown = run_command("serve", "--help").stdout
    for flag in [*FLAGS, *("--" + name.replace("_", "-") for name in ServeSettings.model_fields)]:
        assert f"{flag} " in shown, flag


def test_help_shows_what_holds_where_a_flag_is_not_given() -> None:
    shown = re.sub(r"[\s│]+", " ", run_command("serve", "--help").stdout)
    assert shown.count("Default: ") == len(ServeSettings.model_fields) - 1, "--model has none"
    for default in ("64", "128", "8000", "::", "30", "off", "auto", "the device's", "what the model allows"):
        assert f"Default: {default}." in shown, default


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["100"], "--max-num-batched-tokens=100: below --block-size 128; nearest valid: 128"),
        (["64", "--block-size", "32", "--max-num-seqs", "80"], "below --max-num-seqs 80"),
        (["200"], "not a multiple of --block-size 128"),
        (["512", "--max-num-seqs", "1", "--max-model-len", "256"], "--max-num-seqs x --max-model-len = 256"),
    ],
)
def test_a_budget_that_planning_refuses_is_refused_at_the_start(tmp_path: Path, flags: list[str], told: str) -> None:
    log = tmp_path / "log"
    file = tmp_path / "settings.yaml"
    file.write_text(f"termination-log: {log}\nmodel: {tmp_path / 'nothing'}\n")
    ended = run_command("serve", "--config", str(file), "--max-num-batched-tokens", *flags)
    assert ended.returncode == ExitCode.USAGE
    assert told in ended.stderr
    message = TerminationMessage.parse(log.read_text())
    assert message is not None
    assert (message.reason, told in message.message) == (FailureReason.USAGE, True)


def test_a_budget_that_planning_takes_gets_past_the_check(tmp_path: Path) -> None:
    flags = ["--max-num-batched-tokens", "96", "--block-size", "32", "--port", "0", "--control-port", "0"]
    ended = run_command("serve", "--model", str(tmp_path / "nothing"), *flags)
    assert (ended.returncode, "no such directory" in ended.stderr) == (ExitCode.MODEL, True)


def test_a_variable_that_is_no_setting_is_warned_of_and_no_refusal(tmp_path: Path) -> None:
    known = {"HPU_ENGINE_PORT": "1", "hpu_engine_max_num_seqs": "1", "PATH": ""}
    assert unknown_variables(known) == []
    (typo, link) = unknown_variables({**known, "HPU_ENGINE_SERVICE_HOST": "10.0.0.1", "HPU_ENGINE_MAX_NUM_SEQ": "3"})
    assert typo == ("unknown setting HPU_ENGINE_MAX_NUM_SEQ ignored; did you mean HPU_ENGINE_MAX_NUM_SEQS?")
    assert link == "unknown setting HPU_ENGINE_SERVICE_HOST ignored"
    flags = ["--model", str(tmp_path / "nothing"), "--port", "0", "--control-port", "0"]
    ended = run_command("serve", *flags, HPU_ENGINE_MAX_NUM_SEQ="3", HPU_ENGINE_PORT="tcp://10.0.0.1:8000")
    assert (ended.returncode, typo in ended.stderr) == (ExitCode.MODEL, True)


def test_a_usage_error_exits_2_in_words_with_a_termination_message(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ended = run_command("serve", "--model", "m", "--max-num-seqs", "many", "--termination-log", str(log))
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: --max-num-seqs: ")
    told = TerminationMessage.parse(log.read_text())
    assert told is not None
    assert told.reason is FailureReason.USAGE
    assert run_command("serve", "--no-such-flag").returncode == 2


@pytest.mark.parametrize(
    ("break_it", "reason", "what"),
    [
        ("no directory", FailureReason.MODEL_NOT_FOUND, "no such directory"),
        ("a file", FailureReason.MODEL_NOT_FOUND, "is a file; the directory"),
        ("no config", FailureReason.MODEL_NOT_FOUND, "config.json"),
        ("bad config", FailureReason.MODEL_BROKEN, "not JSON"),
        ("architecture", FailureReason.MODEL_UNSUPPORTED, "GPT2LMHeadModel"),
        ("no tokenizer", FailureReason.MODEL_BROKEN, "no tokenizer.json"),
        ("bad tokenizer", FailureReason.MODEL_BROKEN, "tokenizer.json"),
    ],
)
def test_what_the_server_reads_of_a_checkpoint_is_checked_and_named(
    shell: Path, tmp_path: Path, break_it: str, reason: FailureReason, what: str
) -> None:
    from hpu_engine.server.model_files import load_model
    from hpu_engine.server.pod.termination import Failed

    model = tmp_path / "model"
    model.mkdir()
    for file in shell.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    match break_it:
        case "no directory":
            model = tmp_path / "elsewhere"
        case "a file":
            model = model / "config.json"
        case "no config":
            (model / "config.json").unlink()
        case "bad config":
            (model / "config.json").write_text("{")
        case "architecture":
            (model / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
        case "no tokenizer":
            (model / "tokenizer.json").unlink()
        case "bad tokenizer":
            (model / "tokenizer.json").write_text("{}")
    with pytest.raises(Failed) as raised:
        load_model(model)
    assert raised.value.evidence.reason is reason
    assert what in raised.value.evidence.message
    assert raised.value.evidence.path is not None
