import pytest

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def device():
    yield "theirs"


@pytest.fixture
def gpu_device():
    return "theirs"


def test_passes(device):
    pass


def test_fails(device):
    assert device == "ours"


def test_errs(missing):
    pass


def test_with_a_fixture_of_that_name(gpu_device):
    assert gpu_device == "theirs"


def test_skips():
    pytest.skip("not here")


@pytest.mark.skipif(True, reason="not today")
def test_is_skipped():
    pass


@pytest.mark.xfail
def test_may_fail():
    assert 0


@pytest.mark.gpu("a100")
@pytest.mark.parametrize("number", [1, 2])
def test_gpu(number):
    print("it ran")


class TestUnit(__import__("unittest").TestCase):
    def test_it(self):
        self.skipTest("not there")
