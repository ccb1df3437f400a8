"""Comparison with what others recorded on real GPUs and published.

``sources.json`` says what was recorded where; no recording is part of this repository.
``snapshots`` reads memory snapshots of ``torch.cuda.memory._dump_snapshot``, ``beginning`` finds
the state of the allocator in which a recording begins, ``replaying`` sends it through the replay of
the caching allocator, ``programs`` writes recorded programs out, ``traced`` compares their traces,
and ``kineto`` reads traces of ``torch.profiler``.

``figures.json`` has single figures that others published of whole steps, and ``peaks`` compares
traces with them: ``gpt`` and ``vision_transformer`` are trainings, ``selection`` forwards of
torchvision's networks, of ``t5`` and of ``mistral``.
"""
