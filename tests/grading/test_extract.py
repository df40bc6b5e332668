"""Where the answer is found."""

from __future__ import annotations

import time

import pytest

from umad.grading import GradeItem, Grader, extract

MATH = [
    ("The final answer is: $\\boxed{12}$. I hope it is correct.", "12"),
    ("Therefore, the answer is **42**.", "42"),
    ("**Answer: 17**", "17"),
    ("Final Answer\n\n42", "42"),
    ("### Final Answer\n$$\\frac{7}{2}$$", "\\frac{7}{2}"),
    ("She pays 3*4=<<3*4=12>>12 dollars.\n#### 1,234", "1,234"),
    ("<answer> 3/4 </answer>", "3/4"),
    ("It took 20 minutes.\nA: 12", "12"),
    ("So the total cost is $45.50.", "$45.50"),
    ("we get \\[ x = \\frac{3}{4} \\]", "x = \\frac{3}{4}"),
    ("The answer is 5, because 2+3=5 and not 6.", "5"),
    ("I think the answer is $x^2+1$ since it must be positive", "x^2+1"),
    ("She has 3 apples and buys 4 more so she has 7.", "7"),
    ("the temperature is -5 degrees", "-5"),
    ("the result, 1,000.99m², is large", "1,000.99"),
    ("Soucis : 2,74 $ a..", "2,74"),
    ("\\fbox{3}", "3"),
    ("\\boxed 7", "7"),
    ("it is \\boxed{6} as asked in \\boxed{}", "6"),
    ("x = \\boxed{3}, y = \\boxed{4}", "3, 4"),
    ("\\boxed{3} \\quad \\text{or so I thought. It is} \\quad \\boxed{4}", "4"),
    ("42<|im_end|>", "42"),
    ("10 - 2 = 8", "10 - 2 = 8"),
    ("\\text{Evelyn}", "\\text{Evelyn}"),
    ("the code AZ2K is no number", None),
    ("I'm not sure.", None),
    ("", None),
    (None, None),
]


@pytest.mark.parametrize(("text", "answer"), MATH)
def test_math_answers(text, answer):
    assert extract(text) == answer


CHOICE = [
    ("The answer is (B).", "B"),
    ("b)", "B"),
    ("B. Paris", "B"),
    ("\\boxed{\\text{(D)}}", "D"),
    ("\\boxed{A. bank}", "A"),
    ("I would go with option A.", "A"),
    ("A is correct.", "A"),
    ("Option (C) is the best, not A.", "C"),
    ("Let me think. A bank is a place. So the answer is D: mall", "D"),
    ("I think it's B", "B"),
    ("Both A and B seem right, but the answer is A", "A"),
    ("Therefore, the most fitting answer is **(D) mall**.", "D"),
    ("C\n\nExplanation: A and B are wrong.", "C"),
    ("B and C", "B,C"),
    ("Considering everything, C seems most plausible.", "C"),
    ("I can't decide", None),
]


@pytest.mark.parametrize(("text", "answer"), CHOICE)
def test_option_letters(text, answer):
    assert extract(text, "choice") == answer


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("department store", "C"),
        ("I think it's the mall.", "D"),
        ("\\boxed{bank}", "A"),
        ("(b)", "B"),
        ("The answer is: new york", "E"),
    ],
)
def test_an_options_text_counts_as_its_letter_where_the_options_are_known(text, letter):
    choices = ("bank", "library", "department store", "mall", "new york")
    grade = Grader(kind="choice").grade([GradeItem(letter, text, choices=choices)])[0]
    assert (grade.equal, grade.extracted, grade.key) == (True, letter, f"c:{letter}")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 3 dozen = 36 eggs", "36"),
        ("so 12", "12"),
        ("no number", None),
        ("He paid $1,234.50.", "$1,234.50"),
    ],
)
def test_numbers(text, answer):
    assert extract(text, "number") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is Paris.", "Paris"),
        ("Long.\nThe answer is: Terry Richardson", "Terry Richardson"),
        ("Reasons.\n\n**1986 to 2013**", "1986 to 2013"),
        ("yes", "yes"),
    ],
)
def test_words(text, answer):
    assert extract(text, "text") == answer


def test_require_box_takes_nothing_but_a_box():
    assert extract("the answer is 5", require_box=True) is None
    assert extract("the answer is \\boxed{5}", require_box=True) == "5"
    assert Grader(require_box=True).grade([GradeItem("5", "the answer is 5")])[0].status == "no_answer"


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{5}" * 10_000,
        "\\boxed{" * 20_000,
        "\\boxed{" * 9_000 + "5" + "}" * 9_000,
        "$$" * 100_000,
        "\\[ " * 60_000,
        "the answer is " * 15_000,
        "**" * 100_000,
        "(" * 200_000,
        "1," * 100_000,
        "<answer>" * 20_000,
        "-" * 200_000,
    ],
)
@pytest.mark.parametrize("kind", ["math", "choice", "number", "text"])
def test_extraction_takes_linear_time(text, kind):
    start = time.process_time()
    extract(text, kind)
    assert time.process_time() - start < 2.0
