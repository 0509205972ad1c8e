"""The wheel holds every file of the package and nothing importable but `specsim`; the sdist holds what the wheel needs.

python .ci/check_dist.py DIST, from the root of a checkout. Exits with one line when something is missing.
"""

import pathlib
import sys
import tarfile
import zipfile

dist = pathlib.Path(sys.argv[1])
(wheel,) = dist.glob("*.whl")
(sdist,) = dist.glob("*.tar.gz")
in_wheel = set(zipfile.ZipFile(wheel).namelist())
with tarfile.open(sdist) as archive:
    in_sdist = {name.partition("/")[2] for name in archive.getnames()}

folders = ("specsim", "hardware", "calibration")
files = [path for folder in folders for path in pathlib.Path(folder).rglob("*") if path.is_file()]
sources = {path.as_posix() for path in files if "__pycache__" not in path.parts and not path.name.startswith(".")}

wanted = {name if name.startswith("specsim/") else f"specsim/{name}" for name in sources}
if missing := sorted(wanted - in_wheel):
    sys.exit(f"{wheel.name} lacks {missing}: add them to [tool.setuptools] in pyproject.toml")
if missing := sorted((sources | {"LICENSE", "README.md", "cli.py", "pyproject.toml"}) - in_sdist):
    sys.exit(f"{sdist.name} lacks {missing}: add them to MANIFEST.in")
if strange := sorted(name for name in in_wheel if not name.startswith(("specsim/", "specsim-"))):
    sys.exit(f"{wheel.name} would install {strange} beside specsim")
print(f"{wheel.name}: {len(in_wheel)} files, {len(wanted)} of the package")
