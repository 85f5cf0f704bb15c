/* Opens each argument as ortgpu/environment/libraries/loader_windows.py does, and prints the code of the error, or 0. Then the
   paths of all that is loaded. Built with MinGW and run under Wine by test_wine.py. */

#include <windows.h>
#include <psapi.h>
#include <stdio.h>

int wmain(int count, wchar_t **arguments)
{
    static wchar_t path[32768];
    static HMODULE found[1024];
    DWORD size = 0;

    for (int i = 1; i < count; i++) {
        DWORD flags = wcschr(arguments[i], L'\\') ? 0x1100 : 0x1000;
        HMODULE module = LoadLibraryExW(arguments[i], NULL, flags);
        printf("load %lu\n", module ? 0UL : (unsigned long)GetLastError());
    }
    K32EnumProcessModules(GetCurrentProcess(), found, sizeof found, &size);
    for (DWORD i = 0; i < size / sizeof *found; i++)
        if (GetModuleFileNameW(found[i], path, 32768))
            printf("module %ls\n", path);
    return 0;
}
