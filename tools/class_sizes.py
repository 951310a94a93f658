"""How many public functions the classes of a C++ header have.

Every declaration with a list of parameters counts: constructors, operators, each overload. It reads text, not the language: macros that hide
braces would mislead it.
"""
import re

CLASS = re.compile(r"\b(class|struct)\s+(?:alignas\(\w+\)\s*)?(?:\[\[\w+\]\]\s*)?(\w+)(?:\s+final)?\s*(?::[^{;()]*)?\{")
NO_FUNCTION = re.compile(r"(using|friend|typedef|struct|class|enum|static_assert)\b")


def without_noise(text):
    """Without comments, strings and directives; lines stay where they are."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.S)
    text = re.sub(r'"(\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"^[ \t]*#[^\n]*(\\\n[^\n]*)*", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.M)


def body_of(text, begin):
    """What stands between the braces, without what is in further braces."""
    depth, flat = 1, []
    for char in text[begin:]:
        depth += (char == "{") - (char == "}")
        if depth == 0:
            break
        if depth == 1:
            flat.append("{};" if char == "}" else char)
    return "".join(flat)


def is_function(statement):
    statement = re.sub(r"\s+", " ", statement).strip()
    if not statement or NO_FUNCTION.match(statement):
        return False
    statement = re.sub(r"template ?<[^>]*>+", "", statement)
    statement = re.sub(r"ABSL_\w+\([^)]*\)", "", statement)
    head = re.split(r"[={]", re.sub(r"operator ?(\(\)|[^\w\s(]+)", "operatorX", statement))[0]
    while (shorter := re.sub(r"<[^<>]*>", "", head)) != head:  # std::function<void(int)> is a type
        head = shorter
    return re.search(r"~?\w+ ?\(", head) is not None


def public_functions(kind, body):
    public, count = kind == "struct", 0
    for part in re.split(r"\b(public|private|protected)\s*:(?!:)", body):
        if part in ("public", "private", "protected"):
            public = part == "public"
        elif public:
            count += sum(is_function(statement) for statement in part.split(";"))
    return count


def classes(text):
    """(line, name, public functions) of each class."""
    text = without_noise(text)
    for match in CLASS.finditer(text):
        if not re.search(r"enum\s+$", text[:match.start()]):
            yield text.count("\n", 0, match.start()) + 1, match.group(2), public_functions(match.group(1), body_of(text, match.end()))
