"""Builds outside the tree, so that an install leaves nothing in a clone. All else stands in pyproject.toml."""

import tempfile

from setuptools import setup

with tempfile.TemporaryDirectory() as folder:
    setup(script_name="setup.py", options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}})
