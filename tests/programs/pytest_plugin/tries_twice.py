import pytest
from _pytest.runner import runtestprotocol


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if not runtestprotocol(item, nextitem=nextitem, log=False)[0].failed:
        assert item.name == "test_plain"
    item._initrequest()
    runtestprotocol(item, nextitem=nextitem)
    return True
