r"""One spelling for the signs of LaTeX, plain TeX and amssymb that have several names: `\neq` -> `\ne`, `≤` -> `\le`.

`same_names` only renames. It does not reorder or evaluate, so texts that become equal show the same formula. Signs that
only resemble each other stay different: `<` and `\le`, `\subset` and `\subseteq`, `\pm` and `\mp`.
"""

import re
from collections.abc import Callable

# One line per sign: the name that we keep, and its other names. Unicode signs are names too.
NAMES = r"""
\ne \neq ≠
\le \leq \leqslant \leqq ≤ ≦ ⩽
\ge \geq \geqslant \geqq ≥ ≧ ⩾
< \lt \textless
> \gt \textgreater
\ll ≪
\gg ≫
\lll \llless ⋘
\ggg \gggtr ⋙
\nless ≮
\ngtr ≯
\nleq \nleqslant \nleqq ≰
\ngeq \ngeqslant \ngeqq ≱
\approx \thickapprox ≈
\sim \thicksim ∼
\simeq ≃
\cong ≅
\equiv ≡
\propto \varpropto ∝
\doteqdot \Doteq
\parallel \| \Vert \lVert \rVert \shortparallel ∥ ‖
\perp \bot ⊥ ⟂
\nmid \nshortmid ∤
\nparallel \nshortparallel ∦
\infty \infin ∞
\pm \textpm ±
\mp ∓
\cdot \ast \centerdot \cdotp \textperiodcentered * · ⋅ ∙ ∗
\times \texttimes ×
\div \textdiv ÷
- \textminus − – ‐ ‑
/ \slash ⁄ ∕
\setminus \backslash \smallsetminus \textbackslash ∖
\circ ∘
\star \bigstar ⋆
\sqrt \surd √
| \vert \lvert \rvert \mid \shortmid \textbar ∣
\{ \lbrace \textbraceleft
\} \rbrace \textbraceright
[ \lbrack
] \rbrack
( \lparen
) \rparen
: \colon ∶
\langle ⟨ 〈
\rangle ⟩ 〉
\lfloor ⌊
\rfloor ⌋
\lceil ⌈
\rceil ⌉
\ldots \dots \cdots \dotsc \dotsb \dotsm \dotsi \dotso \hdots \mathellipsis \textellipsis … ⋯
\vdots ⋮
\ddots ⋱
\in \isin ∈
\notin ∉
\ni \owns ∋
\emptyset \varnothing ∅ ⌀
\subset ⊂
\supset ⊃
\subseteq \subseteqq ⊆ ⫅
\supseteq \supseteqq ⊇ ⫆
\subsetneq \subsetneqq \varsubsetneq \varsubsetneqq ⊊ ⫋
\supsetneq \supsetneqq \varsupsetneq \varsupsetneqq ⊋ ⫌
\nsubseteq \nsubseteqq ⊈
\nsupseteq \nsupseteqq ⊉
\cup \bigcup ∪ ⋃
\cap \bigcap ∩ ⋂
\sqcup \bigsqcup ⊔ ⨆
\sqcap ⊓
\uplus \biguplus ⊎
\oplus \bigoplus ⊕ ⨁
\otimes \bigotimes ⊗ ⨂
\odot \bigodot ⊙ ⨀
\ominus ⊖
\wedge \land \bigwedge ∧ ⋀
\vee \lor \bigvee ∨ ⋁
\neg \lnot ¬
\forall ∀
\exists \exist ∃
\nexists ∄
\vdash ⊢
\models ⊨
\therefore ∴
\because ∵
\to \rightarrow \longrightarrow \rarr → ⟶
\gets \leftarrow \longleftarrow \larr ← ⟵
\leftrightarrow \longleftrightarrow \lrarr ↔ ⟷
\Rightarrow \implies \Longrightarrow \rArr ⇒ ⟹
\Leftarrow \impliedby \Longleftarrow \lArr ⇐ ⟸
\Leftrightarrow \iff \Longleftrightarrow \lrArr ⇔ ⟺
\mapsto \longmapsto ↦ ⟼
\uparrow ↑
\downarrow ↓
\nrightarrow ↛
\dashrightarrow \dasharrow ⇢
\upharpoonright \restriction ↾
\sum ∑
\prod ∏
\coprod ∐
\int \smallint ∫
\oint ∮
\partial ∂
\nabla ∇
\angle ∠
\triangle \bigtriangleup \vartriangle △
\lhd \vartriangleleft \triangleleft ⊲
\rhd \vartriangleright \triangleright ⊳
\unlhd \trianglelefteq ⊴
\unrhd \trianglerighteq ⊵
\Box \square □
\Diamond \lozenge ◊
\bullet •
\ell ℓ
\hbar \hslash ℏ
\imath ı
\jmath ȷ
\aleph \alef ℵ
\Re \real ℜ
\Im \image ℑ
\dagger \dag \textdagger †
\ddagger \ddag \textdaggerdbl ‡
' \prime ′ ’
\degree \degrees \textdegree ° º ˚
% \% \percent \textpercent ٪
\$ \textdollar \dollar
\_ \textunderscore
\mathbb{R} \R \reals \Reals ℝ
\mathbb{N} \N \natnums ℕ
\mathbb{Z} \Z \integers ℤ
\mathbb{Q} \Q \rationals ℚ
\mathbb{C} \C \cnums \Complex ℂ
\mathbb \Bbb \mathds
\binom \dbinom \tbinom
\frac \dfrac \tfrac \cfrac \sfrac \xfrac \nicefrac \textfrac
\overline \bar
\vec \overrightarrow
\hat \widehat
\tilde \widetilde
\check \widecheck
\tan \tg
\cot \ctg \cotg
\csc \cosec
\arcsin \asin
\arccos \acos
\arctan \atan \arctg
\arccot \arcctg \arccotg
\log_{10} \lg
\sinh \sh
\cosh \ch
\tanh \th
\alpha α
\beta β
\gamma γ
\delta δ
\epsilon \varepsilon ε ϵ
\zeta ζ
\eta η
\theta \vartheta θ ϑ
\iota ι
\kappa \varkappa κ ϰ
\lambda λ
\mu \textmu μ µ
\nu ν
\xi ξ
\pi π
\varpi ϖ
\rho \varrho ρ ϱ
\sigma \varsigma σ ς
\tau τ
\upsilon υ
\phi \varphi φ ϕ
\chi χ
\psi ψ
\omega ω
\Gamma \varGamma Γ
\Delta \varDelta Δ ∆
\Theta \varTheta Θ
\Lambda \varLambda Λ
\Xi \varXi Ξ
\Pi \varPi Π
\Sigma \varSigma Σ
\Upsilon \varUpsilon Υ
\Phi \varPhi Φ
\Psi \varPsi Ψ
\Omega \varOmega Ω
"""

KEPT_NAME = {name: kept for kept, *others in (line.split() for line in NAMES.strip().split("\n")) for name in others}

# Commands that change how a formula looks, and nothing else.
_SPACES = r"q?quad|enspace|enskip|(?:neg)?(?:thin|med|thick)space|space|nobreakspace"
_STYLES = (
    r"(?:display|text|script|scriptscript)style|limits|nolimits|displaylimits|nonumber|notag|allowbreak|nobreak|relax|"
    r"strut|mathstrut|null|hfill?|smash|ensuremath|math(?:op|bin|rel|ord|open|close|punct|inner)"
)
_SWITCHES = r"rm|bf|it|sf|tt|sl|sc"  # of the font
_FONTS = (
    r"(?:operatorname\*?|[mh]box|math(?:rm|bf|it|sf|tt|normal)|text(?:bf|it|sl|sc|rm|sf|tt|up|md|normal)?|emph|"
    r"boldsymbol|bm|pmb)"
)
_FUNCTIONS = (
    r"arc(?:sin|cos|tan|cot|sec|csc|tg|ctg)|(?:sin|cos|tan|cot)h?|sec|csc|cosec|tg|ctg|log|ln|lg|exp|lim|max|min|sup|"
    r"inf|gcd|lcm|det|deg|dim|ker|arg"
)
_NEGATED = {
    r"\in": r"\notin",
    "=": r"\ne",
    "<": r"\nless",
    ">": r"\ngtr",
    r"\le": r"\nleq",
    r"\ge": r"\ngeq",
    "|": r"\nmid",
    r"\parallel": r"\nparallel",
    r"\exists": r"\nexists",
    r"\subseteq": r"\nsubseteq",
    r"\supseteq": r"\nsupseteq",
    r"\cong": r"\ncong",
    r"\sim": r"\nsim",
    r"\to": r"\nrightarrow",
}
_END = r"(?![A-Za-z])"  # of the name of a command


def _compiled(*rules: tuple[str, str | Callable[[re.Match], str]]) -> list:
    return [(re.compile(pattern), new) for pattern, new in rules]


# In this order: each pattern relies on what those before it left.
_BEFORE_RENAMING = _compiled(
    (r"\\left\s*<", r"\\langle "),
    (r"\\right\s*>", r"\\rangle "),
    (rf"\\(?:left|right|middle|[bB]igg?[lrm]?){_END}\s*\.?", ""),
    (r"\\[hv]space\*?\s*\{[^{}]*\}|\\m?(?:h?skip|kern)\s*-?[0-9.]+\s*[a-z]{2}", " "),
    (r"\\(?:[hv]?phantom|mspace|label|tag\*?|(?:text)?color)\s*\{[^{}]*\}", " "),
    (rf"\\(?:{_SPACES}){_END}|(?<!\\)\\[,;:> ]|~|&nbsp;", " "),
    (rf"\\(?:{_STYLES}){_END}|(?<!\\)\\[!/]\s*", ""),
    (rf"\{{\s*\\(?:{_SWITCHES}){_END}\s*([^{{}}]*)\}}", r"\\text{\1}"),
    (rf"\\(?:{_SWITCHES}){_END}", ""),
    (rf"(\\{_FONTS})\s+([A-Za-z]){_END}", r"\1{\2}"),
    (r"\\(?:math|text|operatorname)(?:rm|normal)?\s*\{\s*([eid])\s*\}", r"\1"),
    (rf"\\{_FONTS}\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
    (rf"\\{_FONTS}\s*\{{\s*mod\s*\}}|(?<![A-Za-z\\])mod{_END}", r"\\mod "),
    (rf"\\{_FONTS}\s*(?=\{{)", r"\\text"),
)
_AFTER_RENAMING = _compiled(
    (r"\\mathbb\s*(?:\{\s*([A-Za-z])\s*\}|([A-Za-z]))", r"\\mathbb{\1\2}"),
    (r"\\not\s*\{?\s*(\\[A-Za-z]+|[=<>|])\s*\}?", lambda sign: _NEGATED.get(sign[1], "\\not" + sign[1]) + " "),
    (rf"\\root{_END}\s*(?:\{{([^{{}}]*)\}}|(\w+))\s*\\of{_END}\s*", r"\\sqrt[\1\2]"),
    (rf"\\(?:pmod|bmod|pod){_END}", r"\\mod "),
    (r"\(\s*\\mod\s*([^()]*)\)|\\mod\s*\{([^{}]*)\}", r"\\mod \1\2"),
    (r"\\(sin|cos|tan|cot|sec|csc)\s*\^\s*(?:\{\s*-\s*1\s*\}|\(\s*-\s*1\s*\))", r"\\arc\1 "),
    (r"\^\s*(?:\{\s*('[\s']*)\}|('[\s']*))", r"\1\2"),
    (r"\^\s*(?:\{\s*)?(?:\\top|\\intercal|\\text\s*\{\s*T\s*\})(?![A-Za-z])(?:\s*\})?", "^T"),
    (r"(?<=,)\s*\.\.\.|\.\.\.(?=\s*[\w,\\+])", r"\\ldots "),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"(\\\{[^{}|:]{1,20}):", r"\1|"),  # {x : x > 0}
    (r"<=|=<", r"\\le "),
    (r">=", r"\\ge "),
    (r"(?<=\s)!=", r"\\ne "),  # n!=5 is n! = 5
    (r"(?<!<)-+>", r"\\to "),
)
_SIGN = re.compile(r"\\[A-Za-z]+|\\.|[^\w\s]", re.DOTALL)
_VECTOR = re.compile(rf"\\(?:vec|hat|mathbf|boldsymbol|bm){_END}")


def same_names(latex: str) -> str:
    r"""The text with one name for each sign, `{a \over b}` as `\frac{a}{b}`, and without sizes, fonts and styles.

    `\times` and `\cdot` are two signs only where there are vectors. What is neither a sign nor a command stays.
    """
    text = re.sub(r"([√∛∜])\s*([0-9]+|[A-Za-z])", r"\1{\2}", latex).replace("∛", r"\sqrt[3]").replace("∜", r"\sqrt[4]")
    text = "".join(KEPT_NAME[c] + " " if not c.isascii() and c in KEPT_NAME else c for c in text)
    for pattern, new in _BEFORE_RENAMING:
        text = pattern.sub(new, text)
    text = _SIGN.sub(lambda sign: _kept_name(sign[0], text[sign.end() : sign.end() + 1]), text)
    if not _VECTOR.search(latex):
        text = re.sub(r"\\times(?![A-Za-z])", r"\\cdot", text)
    for pattern, new in _AFTER_RENAMING:
        text = pattern.sub(new, text)
    return _infix(_infix(text, r"\over", r"\frac"), r"\choose", r"\binom")


def _kept_name(sign: str, following: str) -> str:
    name = KEPT_NAME.get(sign, sign)
    return name + " " if name[-1].isalpha() and following.isalpha() else name


def _infix(text: str, command: str, prefix: str) -> str:
    r"""`{a \over b}` -> `\frac{a}{b}`: the two parts reach to the brackets around them, or to the ends of the text."""
    for _ in range(text.count(command)):
        match = re.search(re.escape(command) + _END, text)
        if match is None:
            break
        start, end = _reach(text, match.start(), -1), _reach(text, match.end(), 1)
        new = f"{prefix}{{{text[start : match.start()].strip()}}}{{{text[match.end() : end].strip()}}}"
        alone = text[start - 1 : start] == "{" and not re.search(r"(?:\\[A-Za-z]+|[\]}^_\\])\s*$", text[: start - 1])
        if alone and text[end : end + 1] == "}":
            start, end = start - 1, end + 1
        text = text[:start] + new + text[end:]
    return text


def _reach(text: str, position: int, step: int) -> int:
    """Where the group around `position` begins (step -1) or ends (step 1)."""
    opening, closing = ("([{", ")]}")[::step]
    depth = 0
    while 0 <= position + min(step, 0) < len(text):
        c = text[position + min(step, 0)]
        if c in closing and depth == 0:
            break
        depth += (c in opening) - (c in closing)
        position += step
    return position
