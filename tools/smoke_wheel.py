#!/usr/bin/env python3
"""Installs a wheel into a root folder with nothing but Python and the C library, and runs it there.

    tools/smoke_wheel.py WHEEL

The root has this interpreter, its standard library, the C and C++ runtimes, and what pip installs
for the wheel: no compiler, no shell, no prometheus-cpp, nothing of this machine. In it, drafts are
staged and committed, a small random Llama decodes with drafts, the metrics are rendered and
`nwor-specpv doctor` is asked. It needs the right to change the root (root, or user namespaces).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).parent / "uv"
SITE = "/site"
# What a manylinux wheel may expect of a machine, and what torch and Python need besides.
RUNTIME = (
    *("libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libutil.so.1"),
    *("libgcc_s.so.1", "libstdc++.so.6", "libnss_files.so.2"),
)

PROGRAM = """
import os, shutil, sys
assert not any(map(shutil.which, ("c++", "g++", "gcc", "cc", "clang", "nvcc", "sh"))), "not bare"
import torch
import nwor_specpv as nwor
from nwor_specpv.transformers import Generator
from transformers import LlamaConfig, LlamaForCausalLM

assert nwor.__file__.startswith("/site/"), nwor.__file__
keys, values = torch.zeros(2, 16, 2, 64), torch.zeros(2, 16, 2, 64)
interceptor = nwor.Interceptor(nwor.NworConfig(strict=True))
interceptor.bind_layer("0", keys, values)
interceptor.begin(nwor.RoundPlan(query_lens=[4], num_drafts=[3]))
rows = torch.randn(4, 2, 64)
interceptor.write("0", rows, rows, torch.arange(4))
path, counts = torch.tensor([[1, -1, -1]]).int(), torch.tensor([1]).int()
receipt = interceptor.commit(path, counts)
assert receipt.ok and receipt.committed_tokens == 1
assert torch.equal(keys[0, :2], rows[:2]) and not keys[0, 2:].any()

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
config = LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=256, **sizes)
model = LlamaForCausalLM(config).eval()
prompt = [5, 9, 11, 5, 9, 11, 5, 9]
with torch.no_grad():
    ids = torch.tensor([prompt])
    for _ in range(24):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
generator = Generator(model, drafter="ngram", check_contract=True)
result = generator.generate(prompt, 24, eos_token_id=-1)
assert result.token_ids == ids[0, len(prompt):].tolist(), result.token_ids
assert result.stats.violations == []
assert "nwor_staged_tokens_total" in nwor.Metrics().render()
print("smoke: committed 1 of 3 drafts, decoded 24 tokens as the model does, rendered metrics")
"""
DOCTOR = """
import sys
sys.argv = ["nwor-specpv", "doctor"]
from nwor_specpv.cli.main import main
sys.exit(main())
"""


def stop(sentence: str) -> SystemExit:
    return SystemExit(f"smoke: {sentence}")


def needed(program: Path) -> set[Path]:
    """The shared libraries that the loader finds for a program or library."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True)
    words = (line.split() for line in done.stdout.splitlines())
    found = (next((word for word in line if word.startswith("/")), None) for line in words)
    return {Path(name) for name in found if name}


def copy_to(root: Path, path: Path) -> None:
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(path, target)


def make_root(root: Path) -> Path:
    """Puts the interpreter and its libraries there; returns its path inside."""
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib")).resolve()
    kept_out = shutil.ignore_patterns("__pycache__", "site-packages", "dist-packages", "test")
    shutil.copytree(library, root / library.relative_to("/"), ignore=kept_out, symlinks=True)
    copy_to(root, python)
    loaded = needed(python)
    for module in (root / library.relative_to("/") / "lib-dynload").glob("*.so"):
        loaded |= needed(module)
    folders = {path.parent for path in loaded}
    loaded |= {folder / name for folder in folders for name in RUNTIME if (folder / name).is_file()}
    for path in loaded:
        copy_to(root, path)
    for name in ("proc", "tmp", "dev"):
        (root / name).mkdir()
    # Files instead of devices, which only root can make; torch reads a few bytes of the first.
    (root / "dev" / "urandom").write_bytes(os.urandom(1 << 20))
    (root / "dev" / "null").touch()
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/tmp:/none\n")
    return python


def install(wheel: Path, root: Path) -> None:
    """What `pip install WHEEL[transformers]` puts into an empty environment."""
    what = [f"nwor-specpv[transformers] @ {wheel.resolve().as_uri()}"]
    command = [str(UV), "pip", "install", "-q", "--python", sys.executable]
    environment = os.environ | {"UV_SYSTEM_CERTS": "1", "UV_HTTP_TIMEOUT": "300"}
    target = ["--target", str(root / SITE.strip("/"))]
    if subprocess.call([*command, *target, *what], env=environment) != 0:
        raise stop("the wheel cannot be installed; the message is above")


def inside(root: Path) -> list[str]:
    """The command that runs what follows with this root, with /proc where that can be mounted."""
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    unshare, chroot = (shutil.which(name, path=search) or name for name in ("unshare", "chroot"))
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    spaces = [unshare, *user, "--mount", "--pid", "--fork"]
    for command in (
        [*spaces, f"--mount-proc={root / 'proc'}", chroot, str(root)],
        [*([unshare, *user] if user else []), chroot, str(root)],
    ):
        probe = [*command, str(Path(sys.executable).resolve()), "-c", "pass"]
        if subprocess.run(probe, capture_output=True).returncode == 0:
            return command
    raise stop("cannot change the root here: run it as root, or allow user namespaces")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    if not wheel.is_file():
        raise stop(f"there is no {wheel}: run `make wheel`")
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="root-", dir=ROOT / "build") as folder:
        root = Path(folder)
        python = make_root(root)
        install(wheel, root)
        start = [*inside(root), str(python), "-B", "-c"]
        environment = {
            "PYTHONPATH": SITE,
            "PYTHONHOME": sys.base_prefix,
            "HOME": "/tmp",
            "PATH": "/bin",
            "OMP_NUM_THREADS": "1",
        }
        for program in (PROGRAM, DOCTOR):
            if subprocess.call([*start, program], env=environment) != 0:
                raise stop(f"{wheel.name} does not run in a bare root; the message is above")
    print(f"smoke: {wheel.name} runs on {platform.machine()} without compiler and prometheus-cpp")
    return 0


if __name__ == "__main__":
    sys.exit(main())
