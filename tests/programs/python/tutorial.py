"""Runs the code of a notebook: `tutorial.py NOTEBOOK`. Prints "ok" if all cells end well.

Jupyter runs it where it is installed, with ipykernel and nbclient; elsewhere the cells are run here, one after
the other, as a script would be.
"""

import json
import sys
import tempfile


def with_jupyter(text):
    import nbclient
    import nbformat

    # The kernel is this Python, whatever kernels the user has.
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    with tempfile.TemporaryDirectory() as folder:
        notebook = nbformat.reads(text, as_version=4)
        nbformat.validate(notebook)
        manager = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(ensure_native_kernel=True))
        where = {"metadata": {"path": folder}}
        client = nbclient.NotebookClient(notebook, km=manager, timeout=120, resources=where)
        # The kernel is ours, so it would be left running.
        client.execute(cleanup_kc=True)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)


def here(text):
    names = {"__name__": "__main__"}
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "a cell", "exec"), names)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        content = file.read()
    try:
        import ipykernel, nbclient  # noqa: E401, F401
    except ModuleNotFoundError:
        here(content)
    else:
        with_jupyter(content)
    print("ok")
