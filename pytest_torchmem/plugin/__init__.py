"""The pytest plugin: hooks, options, fixture, marker, run."""

from pytest_torchmem.plugin.options import leave_this_package_alone

leave_this_package_alone()  # before pytest imports the first of them
