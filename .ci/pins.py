"""Write constraints with hashes: the packages that an environment has installed, as the files that its pip would take for them.

Usage: python .ci/pins.py PYTHON FILE        PYTHON: of the environment. For its platform and its Python alone. Who then installs with
``pip install --require-hashes -r FILE`` and ``pip install --no-deps mmrt`` gets these files or an error.
"""

import json
import subprocess
import sys
from pathlib import Path

_OURS = ("mmrt", "mmrt-lab", "mmrt-demo-model")


def main(python: str, file: str) -> None:
    """Raises: subprocess.CalledProcessError where pip fails: it says why."""
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run([*pip, "list", "--format", "json"], check=True, capture_output=True).stdout)
    wanted = [f"{entry['name']}=={entry['version']}" for entry in listed if entry["name"] not in _OURS]
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]
    report = json.loads(subprocess.run([*pip, "install", *options, *wanted], check=True, stdout=subprocess.PIPE).stdout)
    found = [(entry["metadata"], entry["download_info"]["archive_info"]["hashes"]["sha256"]) for entry in report["install"]]
    lines = [f"{package['name']}=={package['version']} --hash=sha256:{digest}" for package, digest in found]
    Path(file).write_text("\n".join(sorted(lines)) + "\n")
    print(f"{file}: {len(lines)} packages")


if __name__ == "__main__":
    main(*sys.argv[1:])
