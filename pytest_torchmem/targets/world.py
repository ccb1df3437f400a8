"""The world of a distributed program: how many processes there are, and which one is traced."""

from typing import Any, NamedTuple

from pytest_torchmem.errors import UsageError

GPUS_OF_A_NODE = 8
"""How many GPUs a node has, unless a trace says how many GPUs the program sees."""


class World(NamedTuple):
    """One process of ``size`` that run the same program, ``per_node`` of them on each node."""

    size: int
    rank: int = 0
    per_node: int = GPUS_OF_A_NODE

    @property
    def local_rank(self) -> int:
        """The process's number on its node, which is that of its GPU."""
        return self.rank % self.per_node

    @property
    def environment(self) -> dict[str, str]:
        """The variables that ``torchrun`` sets (torch/distributed/elastic/agent/server/
        local_elastic_agent.py, ``_start_workers``).
        """
        node, nodes = self.rank // self.per_node, -(-self.size // self.per_node)
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": min(self.per_node, self.size - node * self.per_node),
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": nodes,
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.size,
            "MASTER_PORT": 29500,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "ROLE_NAME": "default",
            "MASTER_ADDR": "localhost",
            "TORCHELASTIC_RUN_ID": "torchmem",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        return {name: str(value) for name, value in variables.items()}

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


def check_world_size(value: object, source: str) -> int:
    """Return how many processes there are; raises ``UsageError`` for what is no such number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{source}: {value!r}: write how many processes there are, such as 8")
    return value


def check_ranks(value: object, world_size: int | None, source: str) -> tuple[int, ...]:
    """Return ranks of a world; raises ``UsageError`` for what are none of ``world_size``."""
    found: Any = (value,) if isinstance(value, int) else value
    if world_size is None:
        raise UsageError(f"{source}: {value!r}: a rank is one of a world: give world_size= too")
    numbers = isinstance(found, list | tuple) and all(type(rank) is int for rank in found)
    if not numbers or not found or not all(0 <= rank < world_size for rank in found):
        last = world_size - 1
        raise UsageError(f"{source}: {value!r}: write ranks from 0 to {last}, such as (0, {last})")
    return tuple(dict.fromkeys(found))
