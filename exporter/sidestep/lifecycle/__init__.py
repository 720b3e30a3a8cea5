"""Request events into intervals and counts: one state machine per engine. Pure; time is data.

``machine`` takes the events, ``inflight`` has the requests and the counts of them, ``siblings``
the parallel samples of one question, ``places`` the room for all; ``steps`` and ``ends`` tell of steps and of requests that
ended, ``outcomes`` is what comes out, by the ``rules``.
"""
