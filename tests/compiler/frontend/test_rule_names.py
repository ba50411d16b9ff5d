"""rule_names.txt names exactly the operators that have rules."""

from luban.compiler.frontend.torch.decompositions import NAMES, rule_names, table


def test_the_list_of_ruled_operators_is_up_to_date():
    assert NAMES.read_text().split() == rule_names(), "run python -m luban.compiler.frontend.torch.decompositions"


def test_no_operator_with_a_rule_is_decomposed():
    assert not {str(operator) for operator in table()} & set(rule_names())
