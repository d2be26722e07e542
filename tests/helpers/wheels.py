"""Write wheels for tests that install packages without a network."""

import zipfile
from pathlib import Path


def write_wheel(folder: Path, name: str, *requirements: str) -> None:
    """Write the wheel of a package with many modules, which pip needs a moment to install."""
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        for module in ("__init__", *(f"module{i}" for i in range(300))):
            wheel.writestr(f"{name}/{module}.py", "")
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", "Provides-Extra: dev"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        wheel.writestr(f"{name}-1.dist-info/METADATA", "\n".join(lines) + "\n")
        wheel.writestr(f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.dist-info/RECORD", "")
