"""Tricky pairs of a response (or an answer) and a reference: which are right, and which are not."""

from jaxrl.rewards.math import equal, score

RESPONSES_RIGHT = [
    # mixed numbers in LaTeX
    (r"So \boxed{3\frac{1}{2}}", "7/2"), (r"So \boxed{3\frac{1}{2}}", "3.5"), (r"\boxed{7/2}", r"3\frac{1}{2}"),
    (r"\boxed{3.5}", r"3\frac12"), (r"\boxed{-3\frac{1}{2}}", "-3.5"), (r"\boxed{-3.5}", r"$-3\dfrac{1}{2}$"),
    (r"\boxed{3 \frac{1}{2}}", "3 1/2"), (r"it takes $3\frac{1}{2}$ cups", "3.5"),
    (r"it takes $-3\frac{1}{2}$ cups", "-3.5"), (r"it takes 3\dfrac{1}{2}", "7/2"),
    ("it takes 3 1/2 cups", r"3\frac{1}{2}"), (r"\boxed{(3\frac{1}{2}, 2)}", "(3.5, 2)"),
    (r"\boxed{3\frac{1}{2}\pi}", r"\frac{7\pi}{2}"),
    # a unit or words after a final answer
    ("work\n#### 12 dollars", "12"), ("work\n#### **12**", "12"), ("work\n#### **12** dollars", "12"),
    ("work\n#### 12, because 5 and 7 are 12", "12"), ("work\n#### 12 because I counted", "12"),
    ("work\n#### Answer: 12", "12"), ("work\n#### The final answer is 12", "12"), ("work\n#### **Answer:** 12", "12"),
    ("work\n#### $12/week", "12"), ("work\n#### $12", "12"), ("work\n#### $1,200.00", "1200"),
    ("work\n#### 12.", "12"), ("work\n#### 12 apples.", "12"), ("work\n#### 12%", "12"), ("work\n#### 12 km/h", "12"),
    ("work\n#### 12 m", "12"), ("work\n#### -12 degrees", "-12"), ("work\n#### €12", "12"),
    ("work\n#### 12 square feet", "12"), ("work\n#### 12 cents a day", "12"), ("work\n#### 5 more dollars", "5"),
    (r"\boxed{12 \text{ dollars}}", "12"), (r"\boxed{12\text{cm}^2}", "12"), (r"\boxed{12\,\mathrm{m}}", "12"),
    (r"\boxed{12}", r"12 \text{ inches}"), (r"\boxed{12 \text{ in}}", r"12 \text{ inches}"), (r"\boxed{\$12}", "12"),
    (r"\boxed{90^\circ}", "90"), (r"\boxed{90}", r"90^{\circ}"), (r"\boxed{90°}", r"90^\circ"),
    (r"\boxed{2 \text{ million}}", "2000000"), ("It is 2.5 million.\n#### 2.5 million dollars", "2,500,000"),
    # numbers glued to word characters
    ("答案是18。", "18"), ("答案是-18。", "-18"), ("so it is _18_", "18"), ("so it is __18__.", "18"),
    ("the answer is18", "18"), ("It takes 18分", "18"), ("Réponse:18", "18"),
    # multiple choice
    (r"\boxed{\text{(C)}}", "C"), (r"\boxed{\textbf{(C)}}", "C"), (r"\boxed{C}", "(C)"), (r"\boxed{(c)}", "C"),
    (r"\boxed{\text{C}}", "C"), (r"\boxed{C. 12 apples}", "C"), (r"\boxed{\textbf{(C)}\ 12}", "C"),
    (r"\boxed{C) 12}", "C"), (r"\boxed{\text{Option C}}", "C"), ("<answer>(C)</answer>", "C"),
    ("The answer is (C).", "C"), ("**Answer:** C", "C"), ("The answer is **C**.", "C"), ("The answer is Yes.", "Yes"),
    (r"\boxed{\text{Yes}}", "yes"), (r"\boxed{\text{Yes, it is}}", "Yes"),
    # which answer counts
    (r"\boxed{1} no, \boxed{2}", "2"), (r"\boxed{12} as asked, in \boxed{}", "12"), (r"\boxed{\boxed{12}}", "12"),
    (r"\fbox{12}", "12"), (r"\boxed{42\ }", "42"), ("work\n#### 12 = x", "12"), ("work\n#### 7 (seven) days", "7"),
    ("work\n#### 21 (twenty-one) days", "21"), (r"\boxed{3}, \boxed{5}", "3,5"),
    (r"$x=\boxed{3}$ or $x=\boxed{5}$", "3, 5"), (r"\boxed{5}" "\n\n" r"\boxed{5}", "5"),
    (r"\boxed{3}, then \boxed{5}", "5"), (r", \boxed{5}", "5"), (r"\boxed{8:30 AM}", r"8:30\text{ a.m.}"),
    ("The answer is 8:30 AM.", "8:30 AM"),
    # thinking, and what follows it
    (r"<think>\boxed{4}</think> So it is 5.", "5"), (r"<think>\boxed{4}</think> So it is \boxed{5}.", "5"),
    (r"<think>\boxed{4}</think>" "\n", "4"), (r"<think>\boxed{4}", "4"),
    ("<answer>3</answer> no <ANSWER> 4 </ANSWER>", "4"),
]  # fmt: skip
RESPONSES_WRONG = [
    (r"So \boxed{3\frac{1}{2}}", "31/2"), (r"So \boxed{3\frac{1}{2}}", "3/2"),
    (r"it takes $3\frac{1}{2}$ cups", "1/2"), (r"\boxed{31/2}", r"3\frac{1}{2}"), ("work\n#### 12 or 13", "12"),
    ("work\n#### 12 or 13", "13"), ("work\n#### 12 and a half", "12"), ("work\n#### 12 hours thirty minutes", "12"),
    ("work\n#### 12 million", "12"), ("work\n#### 12 x", "12"), ("work\n#### 12x", "12"), ("work\n#### 12 pi", "12"),
    ("work\n#### 12 to 15", "15"), ("work\n#### 12 + 3", "12"), ("work\n#### 12 is wrong", "12"),
    ("work\n#### 13, because 12 is too small", "12"), (r"\boxed{12 \text{ cm}}", r"12 \text{ m}"),
    (r"\boxed{12 \text{ dollars}}", "13"), (r"\boxed{12n}", "12"), (r"\boxed{12}", "12n"),
    ("H2O has 3 atoms in one molecule of H2O", "2"), ("x_1 is 5 and x_2", "2"), ("then take log2", "2"),
    ("答案是18。", "8"), (r"\boxed{\text{(C)}}", "D"), (r"\boxed{C. 12 apples}", "A"), (r"\boxed{C or D}", "C"),
    (r"\boxed{(C) or (D)}", "C"), (r"\boxed{(C), (D)}", "C"), (r"\boxed{C: or rather D}", "C"),
    ("The answer is (C), not (D).", "D"), (r"\boxed{12", "13"), (r"\boxed{1} no, \boxed{2}", "1"),
    ("I do not know", "0"), (r"<think>\boxed{4}</think> So it is 5.", "4"),
    (r"<think>\boxed{4}</think> I do not know.", "4"), (r"\boxed{3}, \boxed{5}", "5"),
    ("work\n#### 7 (eight) days", "7"), ("work\n#### 12 = 13", "12"), (r"\boxed{(1,234)}", "1234"),
    (r"\boxed{[1,234]}", "1234"), (r"\boxed{\{1,234\}}", "1234"),
    (r"\boxed{703 \text{ to } 704 \text{ cm}}", "703 cm"), ("", "0"), (r"\boxed{}", "0"),
]  # fmt: skip
ANSWERS_RIGHT = [
    # numbers
    ("0.5", "1/2"), (r"\frac{1}{2}", "0.5"), (r"\frac12", "1/2"), (r"\tfrac{1}2", "0.5"), ("½", "0.5"), ("3½", "7/2"),
    ("50%", "0.5"), (r"50\%", "1/2"), ("0.5", r"50\%"), ("50", r"50\%"), ("50 percent", r"50\%"), ("12.5%", "12.5"),
    ("1e-7", "0.0000001"), (r"1 \times 10^{-7}", "1e-7"), ("10^{-7}", "0.0000001"), ("1.5e3", "1500"),
    (r"1.5\times10^3", "1500"), ("10⁻³", "0.001"), ("2^{10}", "1024"), (r"0.\overline{3}", "1/3"),
    (r"0.1\overline{6}", r"\frac{1}{6}"), ("0.333333", r"\frac{1}{3}"), ("+5", "5"), ("−5", "-5"), ("007", "7"),
    ("5.", "5.00"), ("1,234,567", "1234567"), ("1 234 567", "1234567"), (r"1{,}234", "1234"),
    (r"12,\!000,\!085", "12000085"), ("１２", "12"), ("-1/2", r"\frac{-1}{2}"), (r"-\frac{-1}{2}", "0.5"),
    ("3:4", "3:4"), ("9" * 5000, "9" * 5000), ("9" * 4500 + ".0", "9" * 4500),
    # decimals of what is asked
    ("0.3333333333333333", r"\frac{1}{3}"), ("0.6666666666666666", r"\frac{2}{3}"),  # cut, as a float is printed
    ("0.30000000000000004", "0.3"), ("1.414214", r"\sqrt{2}"), ("1.41421356", r"\sqrt2"), ("1.23456789", "1.234568"),
    ("33.333333%", "1/3"), (r"2.5\mathrm{e}4", "25000"), ("10**12", "1000000000000"),
    # degrees, times and the imaginary unit
    (r"30^\circ", r"\frac{\pi}{6}"), (r"\frac{\pi}{6}", r"30^{\circ}"), (r"\frac{\pi}{6}", "30 degrees"),
    (r"22.5^\circ", r"\pi/8"), (r"90^\circ-\theta", r"90-\theta"), (r"\sin 30^\circ", r"\frac{1}{2}"),
    (r"\cos^2(30°)", r"\frac34"), ("08:30am", "8:30 AM"), ("20:30", r"8:30 \text{ p.m.}"), ("8:30", "8:30 PM"),
    ("5 pm", "5:00 PM"), ("(1+i)^2", "2i"), (r"e^{i\pi}", "-1"),
    # expressions
    (r"\pi/2", r"\dfrac{\pi}{2}"), (r"0.5\pi", r"\frac{\pi}{2}"), ("2π", r"2\pi"),
    (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), ("√2", r"\sqrt{2}"), ("x²+1", "1+x^2"), ("(x+1)^2", "x^2+2x+1"),
    (r"\ln 2 + C", r"C+\ln(2)"), (r"\frac{1}{e}", "e^{-1}"), (r"\sin^2 x + \cos^2 x", "1"),
    ("(x+1)^{200}", "(1+x)^{200}"), (r"\binom{5}{2}", "10"), ("5!", "120"),
    ("2^{100}", "1267650600228229401496703205376"),
    # equations
    ("x=5", "5"), ("5", "x = 5"), (r"x = 3\frac{1}{2}", "7/2"), ("f(x) = 2x", "2x"),
    (r"\theta=\frac{\pi}{2}", r"\pi/2"), ("2x+z=5", "2x + z - 5 = 0"), (r"x \in (0,1)", "(0, 1)"),
    # intervals, tuples, sets and lists
    ("[0,1)", "[0, 1)"), (r"\left[0, 1\right)", "[0,1)"), ("[0, 50%)", "[0, 1/2)"), (r"(-\infty, 2]", "(-∞,2]"),
    (r"(-inf, 2]", r"(-\infty, 2]"), (r"(-\infty,0)\cup(1,\infty)", r"(1,\infty)\cup(-\infty,0)"), ("0<x<1", "(0,1)"),
    (r"\{1,2,3\}", r"\{3, 2, 1\}"), ("1, 2, 3", r"\{3, 1, 2\}"), ("2 and 1", "1, 2"), ("x=1 or x=2", "1, 2"),
    (r"x=2 \text{ or } x=1", r"\{1,2\}"), (r"\pm 2", "2, -2"), (r"1 \pm \sqrt{2}", r"1-\sqrt2, 1+\sqrt2"),
    (r"\left(-\frac{13}{4}, 3\right)", "(-3.25, 3)"), ("x=1, y=2", "(1,2)"), (r"\frac{1}{5}, \frac14", "0.2, 0.25"),
    (r"\{5\}", "5"), ("∅", r"\emptyset"), (r"\varnothing", r"\emptyset"), (r"\{ \}", r"\varnothing"),
    ("(1,234)", "(1, 234)"), ("[0,100)", "[0, 100)"), (r"\lbrace 100,200 \rbrace", r"\{200, 100\}"),
    (r"(1,\,200)", "(1, 200)"), ("(1,234, 5,678)", "(1234, 5678)"), (r"x=2 \text{ or } x=-\frac12", r"-\frac12, 2"),
    ("5 or 5.0", "5"), ("C, A", "A, C"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\begin{pmatrix} 7 \\ -2 \end{pmatrix}", r"\begin{pmatrix}7\\-2\end{pmatrix}"), ("infinity", r"\infty"),
    (r"+\infty", r"\infty"),
    # form
    ("$12$", "12"), (r"\(12\)", "12"), ("{12}", "12"), ("**12**", "12"), ("`12`", "12"), (r"\mathrm{True}", "true"),
]  # fmt: skip
ANSWERS_WRONG = [
    ("1e-7", "0"), ("0", "1e-7"), ("0.0", "e^{-20}"), ("1e-7", "2e-7"), ("0.0000001", "0.00000011"),
    (r"\frac{1}{10000000}", "0"), ("10^{-7}", "0"), ("0.33", "1/3"), ("1000001", "1000000"),
    # nearly what is asked
    ("1000000.0000001", "1000000"), ("1000000.0000001", "10^6"), ("1000000.0000001", r"\sqrt{10^{12}}"),
    ("0.9999999", "1"), ("2.0000001", "2.0"), ("0.5000001", "0.5"), ("0.33333349", "1/3"), ("0.333334", "1/3"),
    ("0.001429", "1/700"), ("1.41421449", r"\sqrt2"), ("1.41421", r"\sqrt2"), ("3.1415926", "3.1415928"),
    ("(1, 2.0000001)", "(1, 2)"), ("30", r"\frac{\pi}{6}"), (r"31^\circ", r"\frac{\pi}{6}"),
    (r"\frac{\pi}{2}^\circ", r"\frac{\pi}{2}"), (r"\frac{\pi}{2}^\circ", r"90^\circ"), (r"\sin 30", r"\frac{1}{2}"),
    (r"\sin 30^\circ", r"\sin 30"), ("8:30 AM", "8:30 PM"), ("8:30 AM", "8:35 AM"), ("20:30", "8:30 AM"),
    ("(1-i)^2", "2i"), ("i<2", "i<3"),  # where i cannot be the imaginary unit
    (r"\max(i,2)", "5"), (r"\emptyset", "0"), (r"\{0\}", r"\varnothing"), ("(663,816)", "663816"), ("3 to 5", "3"),
    ("31/2", r"3\frac{1}{2}"), (r"3\frac{1}{2}", "3/2"), ("50%", "5"), ("0.5%", "0.5"), ("0.05", r"50\%"),
    ("500", r"50\%"), ("9" * 5000, "9" * 4999 + "8"), ("9" * 5000, "9"), ("1,2", "12"), ("12", "1,2"), ("1", "-1"),
    (r"\pi", "3.14"), ("2x", "2"), ("x", "y"), ("x+1", "x-1"), (r"\sqrt{2}", "2"), ("sey", "Yes"), ("No", "Yes"),
    ("1", "Yes"), ("(0,1)", "[0,1)"), ("[0,1]", "[0,1)"), (r"\{0,1\}", "(0,1)"), ("(1,2)", "(2,1)"),
    (r"\{1,2\}", r"\{1,2,3\}"), ("1, 2, 2", "1, 1, 2"), ("1, 2", "1"), ("1", "1, 2"), (r"\pm 2", "2"), ("2", r"\pm 2"),
    ("D, E, A, C, B", "E, D, A, C, B"), ("x=5", "y=5"), ("x=5", "6"), ("2x+z=5", "2x+z=6"), ("12 or 13", "12"),
    ("12 or 13", "13"), ("5 apples", "6 apples"), ("5 kg", "5 g"), ("5 hours", "5 minutes"), ("3:4", "3:5"),
    (r"\frac{", "12"), (r"\infty", r"-\infty"), ("12", "x"), ("", "12"), ("the number that the reference has", "12"),
    # powers and factorials that must not be computed
    ("9^{9^{9^9}}", "9"), ("9^9^9^9", "9"), ("9**9**9", "9"), (r"9^{9^{9}}", r"9^{387420488}"), ("(10^{9})!", "1"),
    ("((10!)!)!", "1"), (r"\prod_{k=1}^{10^{12}} k", "1"), (r"\binom{10^9}{5\cdot 10^8}", "1"), (r"\Gamma(10^9)", "1"),
    (r"e^{e^{e^{100}}}", "1"), ("1e999999999", "1"), ("10^{999999999}", "1"), ("(a+b+c+d)^{60}", "a"),
    ("(x+1)^{100000}", "x^2"), ("x^{9^{9^9}}", "x"), ("(" * 500 + "1" + ")" * 500, "2"),
    ("{" * 500 + "1" + "}" * 500, "2"),
]  # fmt: skip


def test_responses():
    right = {pair: score(*pair) for pair in RESPONSES_RIGHT}
    assert {pair: info for pair, (reward, info) in right.items() if reward != 1.0} == {}
    wrong = {pair: score(*pair) for pair in RESPONSES_WRONG}
    assert {pair: info for pair, (reward, info) in wrong.items() if reward != 0.0} == {}


def test_answers():
    right = {pair: equal(*pair) for pair in ANSWERS_RIGHT}
    assert {pair: by for pair, (correct, by) in right.items() if not correct} == {}
    wrong = {pair: equal(*pair) for pair in ANSWERS_WRONG}
    assert {pair: by for pair, (correct, by) in wrong.items() if correct} == {}
