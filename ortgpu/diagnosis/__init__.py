"""Judgement: from facts to errors that have not been raised yet.

Importing this package imports none of its modules: if one thread imports the package and another a module that the
package imports, Python gives one of them half a module.
"""
