"""Judgement: from facts to errors that have not been raised yet.

The import of this package imports none of its modules. Otherwise two threads, with imports of the package and of such a
module, could collide: Python gives one of them half a module.
"""
