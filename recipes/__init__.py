"""Models that come with the harness, and the checks on settings that all of them share.

A recipe is a plain class that a file in ``conf/recipe/`` names by ``_target_``. It knows its data, its model, its optimizer
and its loss; it knows nothing of ranks, devices or the harness.
"""


def require_count(name: str, value: object, least: int = 1) -> None:
    """Refuse a setting that is not a whole number of at least ``least``.

    Raises:
        ValueError: Names the setting as it is typed, its value and what to type instead.
    """
    # Python counts True as a whole number.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"recipe.{name}={value} is not a whole number of at least {least}: type recipe.{name}={least} or more."
        )


def require_fraction(name: str, value: object) -> None:
    """Refuse a setting that is not a number from 0 up to, but not including, 1.

    Raises:
        ValueError: Names the setting as it is typed, its value and what to type instead.
    """
    # The comparison is false of nan, which is so refused too.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        raise ValueError(f"recipe.{name}={value} is not a number from 0 to less than 1: type for example recipe.{name}=0.1.")


def require_positive(name: str, value: object) -> None:
    """Refuse a setting that is not a finite number greater than 0.

    Raises:
        ValueError: Names the setting as it is typed, its value and what to type instead.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"recipe.{name}={value} is not a number greater than 0: type for example recipe.{name}=0.1.")


def require_switch(name: str, value: object) -> None:
    """Refuse a setting that is neither true nor false.

    Raises:
        ValueError: Names the setting as it is typed, its value and what to type instead.
    """
    if not isinstance(value, bool):
        raise ValueError(f"recipe.{name}={value} is neither true nor false: type recipe.{name}=true or recipe.{name}=false.")
