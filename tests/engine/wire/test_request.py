"""Requests of a server, by which a node names noise and what it gives once."""

from __future__ import annotations

from lit_fed.engine.wire.request import Request


def test_a_round_has_one_training_whatever_question_a_server_names_beside_it() -> None:
    fields = {"run": "a", "round": 1}
    question = {"protocol": "clients", "subset": "test"}
    assert Request.read({**fields, **question, "work": "train"}) == Request.read({**fields, "work": "train"})
    assert Request.read({**fields, **question, "work": "ask"}).name == "a/ask/clients/test"
