"""What breaks around the plugin: its library, its registration. vLLM says so and goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import nwor_specpv
from nwor_specpv.models import stories
from nwor_specpv.vllm import plugin
from support.engine_process import run_job
from support.engines import STAGED, story_prompts

PACKAGE = Path(nwor_specpv.__file__).parent


def broken_package(folder: Path, damage: str) -> Path:
    """A copy of this package with one thing wrong with its library; its folder for the path."""
    root = folder / "python"
    shutil.copytree(PACKAGE, root / "nwor_specpv", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "nwor_specpv_vllm.py", root)
    package = root / "nwor_specpv"
    if damage == "missing":
        (package / "libnwor_specpv.so").unlink()
    elif damage == "damaged":
        (package / "libnwor_specpv.so").write_bytes(b"no library at all")
    else:  # built for another torch, whose ABI need not be this one's
        stamp = package / "_build_info.json"
        stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"torch": "2.10.0"}))
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("missing", "nwor_specpv is not built"),
        ("damaged", "cannot load"),
        ("other torch", "was built for torch 2.10.0, but torch"),
    ],
)
def test_vllm_serves_without_a_library_that_does_not_fit(
    tmp_path: Path, damage: str, sentence: str
) -> None:
    """The plugin says so in one line; the engine is then vLLM's own."""
    root = broken_package(tmp_path, damage)
    model = {"model": str(stories()), "skip_tokenizer_init": True}
    job = {"start": {"nwor": STAGED, **model}, "prompts": story_prompts(1), "max_tokens": 8}
    result = run_job(tmp_path, job, path=root, VLLM_LOGGING_LEVEL="WARNING")
    assert len(result["tokens"][0]) == 8
    assert not result["plugin"]
    lines = [line for line in result["log"].splitlines() if "nwor_specpv is off: " in line]
    assert lines
    assert all(sentence in line for line in lines)
    # vLLM 0.32 logs one of its renderer (base.py), which has no tokenizer to warm up with.
    told = [line for line in result["log"].splitlines() if "[base.py:" not in line]
    assert not any("Traceback" in line for line in told)


def test_custom_without_the_plugin_is_refused_by_vllm() -> None:
    """What a user sees who asks for CUSTOM where the plugin was not loaded."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.CUSTOM.clear_override()
    try:
        with pytest.raises(ValueError, match="Backend CUSTOM must be registered before use"):
            AttentionBackendEnum.CUSTOM.get_class()
    finally:
        plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == plugin.CUDA_BACKEND
