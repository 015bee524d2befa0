import pytest
from answers import ANSWERS, Answer


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.id)
def test_one_call_answers_each_question(answer: Answer) -> None:
    got = answer.compute()
    if answer.tolerance:
        assert got == pytest.approx(answer.value, rel=answer.tolerance)
    else:
        assert got == answer.value


def test_every_question_is_asked_once() -> None:
    assert len({answer.id for answer in ANSWERS}) == len(ANSWERS) > 90
