"""Every message that senders and the exporter share; nothing here does I/O.

Structs are positional (``array_like``). To evolve them: new fields at the end,
each with a default; never another type for a field; never another tag.
"""
