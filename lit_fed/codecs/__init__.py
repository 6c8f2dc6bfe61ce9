"""Codecs pack payloads for the wire. Subclass `Codec` for your own."""

from __future__ import annotations

from lit_fed.codecs.cast import CastCodec
from lit_fed.codecs.quantised import QSGD, Int8, SignSGD
from lit_fed.codecs.sparse import RandomK, TopK
from lit_fed.engine.wire.channel import Codec, Context
from lit_fed.face import live_here

__all__ = ["QSGD", "CastCodec", "Codec", "Context", "Int8", "RandomK", "SignSGD", "TopK"]

live_here(globals())
