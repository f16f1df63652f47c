"""What a compiled model tells its user through the log, once each."""

from __future__ import annotations

import logging

logger = logging.getLogger("lohan_fx")


class Notices:
    """Warnings of one model. Each topic is said once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, topic: str, message: str) -> None:
        """Log the message, if nothing has been said of the topic yet."""
        if topic not in self._said:
            self._said.add(topic)
            logger.warning("lohan_fx: %s", message)
