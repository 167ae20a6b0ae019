"""Where the packages lie. Everything else stands in pyproject.toml.

The search below finds new subpackages by itself; pyproject.toml can express a search or an
explicit mapping, not both, and the recorded data keep their place among the tests while
they are installed under a name of their own.
"""

from setuptools import find_packages, setup

ROOTS = {
    "": ["ipc_handoff", "indexer_service", "attention_worker"],
    "client": ["indexer_client", "dsa_indexer_cli"],
    "proto": ["dsa_indexer"],
}
RECORDINGS = "dsa_indexer_recordings"

packages = [RECORDINGS]
package_dir = {RECORDINGS: "tests/data"}
for root, names in ROOTS.items():
    include = [pattern for name in names for pattern in (name, f"{name}.*")]
    packages += find_packages(root or ".", include=include)
    if root:
        package_dir |= {name: f"{root}/{name}" for name in names}

setup(packages=packages, package_dir=package_dir)
