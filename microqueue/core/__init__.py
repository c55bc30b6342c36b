"""What a queue does, without saying how it is run: the part that sync and async share.

Each method composes operations into one; ``Queue`` runs it, ``AsyncQueue`` awaits it.
"""

from microqueue.core.administration import Administration
from microqueue.core.delivery import Delivery, worker_name
from microqueue.core.producing import Producing
from microqueue.task import PayloadT

__all__ = ["QueueCore", "worker_name"]


class QueueCore(Producing[PayloadT], Delivery[PayloadT], Administration[PayloadT]):
    """The operations of a queue."""
