"""What a shown program uses of cells that the book does not show: imports are repeated above it,
other names are listed in a comment."""

import ast
import symtable

HIDDEN = "# set in a cell that is not shown: {}"


class HiddenNames:
    """The hidden names of one chapter, whose cells are told in their order."""

    def __init__(self) -> None:
        self.imports = dict[str, str]()  # name -> its import, empty of a name that is computed

    def hide(self, code: str) -> None:
        """Remember what a cell that is not shown sets."""
        if table := _table(code):
            self.imports |= dict.fromkeys(_set(table), "") | _imports(code)

    def shown(self, code: str) -> str:
        """`code`, below what it uses of cells that were not shown; a name is told once."""
        table = _table(code)
        if table is None:
            return code
        asked = _asked(table)
        used = [name for name in self.imports if name in asked]
        told = [self.imports[name] for name in used if self.imports[name]]
        if computed := [name for name in used if not self.imports[name]]:
            told.append(HIDDEN.format(", ".join(computed)))
        known = {*used, *_set(table)}
        self.imports = {name: text for name, text in self.imports.items() if name not in known}
        return "\n".join([*told, code])


def _table(code: str) -> symtable.SymbolTable | None:
    """The names of a cell; None if it is no Python, as `%matplotlib` is not."""
    try:
        return symtable.symtable(code, "cell", "exec")
    except SyntaxError:
        return None


def _set(table: symtable.SymbolTable) -> set[str]:
    names = table.get_symbols()
    return {name.get_name() for name in names if name.is_assigned() or name.is_imported()}


def _asked(table: symtable.SymbolTable) -> set[str]:
    """The names that a cell and its functions read and the cell does not set."""
    inner, found = [*table.get_children()], table.get_symbols()
    while inner:
        one = inner.pop()
        inner += one.get_children()
        found += [name for name in one.get_symbols() if name.is_global()]
    return {name.get_name() for name in found if name.is_referenced()} - _set(table)


def _imports(code: str) -> dict[str, str]:
    """What a cell imports: name -> the import of this name alone."""
    found = dict[str, str]()
    for node in ast.parse(code).body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for each in node.names:
            alone: ast.stmt = ast.Import([each])
            if isinstance(node, ast.ImportFrom):
                alone = ast.ImportFrom(node.module, [each], node.level)
            found[each.asname or each.name.partition(".")[0]] = ast.unparse(alone)
    return found
