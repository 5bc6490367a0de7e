"""Looking into a traced function: what runs where, and what crosses between tasks.

Works on the GraphDef, so what is seen is what a worker is sent.  The bodies of
loops and branches are part of it.
"""

import collections
import dataclasses


@dataclasses.dataclass(eq=False)
class Operation:
    """One operation of a traced function.

    Attributes:
        name: str.
        type: str, for example "MatMul".
        device: str as the trace has it; "" is the worker that runs the function.
        inputs: list of `(Operation, output)`; arguments are of type "Argument".
        controls: list of `Operation` that must run before.
        variables: set of names of the variables whose handle it takes.
    """

    name: str
    type: str
    device: str
    inputs: list = dataclasses.field(default_factory=list)
    controls: list = dataclasses.field(default_factory=list)
    variables: set = dataclasses.field(default_factory=set)


# The attributes with the functions of an operation, and its first input for them.
_CALLS = {
    "While": (("body", "cond"), 0),
    "StatelessWhile": (("body", "cond"), 0),
    "If": (("then_branch", "else_branch"), 1),
    "StatelessIf": (("then_branch", "else_branch"), 1),
    "PartitionedCall": (("f",), 0),
    "StatefulPartitionedCall": (("f",), 0),
}


def operations(concrete, variables):
    """All operations of a concrete function, those of its loops included.

    Args:
        concrete: `tf.types.experimental.ConcreteFunction`.
        variables: dict from name to `tf.Variable`.

    Returns:
        List of `Operation`.
    """
    graph = concrete.graph.as_graph_def()
    library = {function.signature.name: function for function in graph.library.function}
    names = {id(variable.handle): name for name, variable in variables.items()}
    handles = {
        internal.op.name: names[id(external)]
        for external, internal in concrete.graph.captures
        if id(external) in names
    }
    found = []
    _walk(graph.node, handles, library, found)
    return found


def _walk(nodes, handles, library, found):
    """Adds the operations of one graph; `handles`: variables by argument name."""
    handles = dict(handles)
    by_name = {node.name: Operation(node.name, node.op, node.device) for node in nodes}
    for node in nodes:
        operation = by_name[node.name]
        bound = []
        for text in node.input:
            name, _, output = text.lstrip("^").partition(":")
            source = by_name.setdefault(name, Operation(name, "Argument", ""))
            if text.startswith("^"):
                operation.controls.append(source)
                continue
            operation.inputs.append((source, output or "0"))
            bound.append(handles.get(name))
        operation.variables = {name for name in bound if name is not None}
        if node.op == "Identity" and operation.variables:
            (handles[node.name],) = operation.variables
            continue
        attributes, first = _CALLS.get(node.op, ((), 0))
        for attribute in attributes:
            function = library[node.attr[attribute].func.name]
            arguments = [argument.name for argument in function.signature.input_arg]
            inner = dict(zip(arguments, bound[first:], strict=True))
            inner = {name: variable for name, variable in inner.items() if variable}
            _walk(function.node_def, inner, library, found)
        if node.op not in _CALLS:
            found.append(operation)


def before(operation):
    """The operations that must have run before `operation`, as a set."""
    found, waiting = set(), [operation]
    while waiting:
        last = waiting.pop()
        new = {*last.controls, *(source for source, _ in last.inputs)} - found
        found |= new
        waiting += new
    return found


def task(device):
    """The task of a device, "ps 1"; "worker" for that which runs the function."""
    if "/job:" not in device:
        return "worker"
    job = device.partition("/job:")[2].partition("/")[0]
    return f"{job} {device.partition('/task:')[2].partition('/')[0]}"


def messages(found):
    """What crosses between tasks, each tensor once for each task that needs it.

    A constant of one consumer is made where it is used.  Handles of variables
    stay where the variable is.

    Returns:
        Counter of `(from task, to task, "data" or "control")`.
    """
    consumers = collections.Counter(s for op in found for s, _ in op.inputs)
    crossing = set()
    for operation in found:
        here = task(operation.device)
        edges = [(source, "data", output) for source, output in operation.inputs]
        edges += [(source, "control", None) for source in operation.controls]
        for source, kind, output in edges:
            local_constant = source.type == "Const" and consumers[source] <= 1
            handle = source.type in ("Argument", "Placeholder")
            if task(source.device) != here and not local_constant and not handle:
                crossing.add((source, output, here, kind))
    return collections.Counter(
        (task(source.device), here, kind) for source, _, here, kind in crossing
    )
