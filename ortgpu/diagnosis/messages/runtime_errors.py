"""The errors of CUDA's runtime by name, and the one that a text of ONNX Runtime's or of a library under it reports."""

from __future__ import annotations

import re

# What cudaGetErrorName of CUDA 13.0 answers
CODES = {
    "cudaErrorInvalidValue": 1, "cudaErrorMemoryAllocation": 2, "cudaErrorInitializationError": 3,
    "cudaErrorCudartUnloading": 4, "cudaErrorProfilerDisabled": 5, "cudaErrorProfilerNotInitialized": 6,
    "cudaErrorProfilerAlreadyStarted": 7, "cudaErrorProfilerAlreadyStopped": 8, "cudaErrorInvalidConfiguration": 9,
    "cudaErrorVersionTranslation": 10, "cudaErrorInvalidPitchValue": 12, "cudaErrorInvalidSymbol": 13,
    "cudaErrorInvalidHostPointer": 16, "cudaErrorInvalidDevicePointer": 17, "cudaErrorInvalidTexture": 18,
    "cudaErrorInvalidTextureBinding": 19, "cudaErrorInvalidChannelDescriptor": 20,
    "cudaErrorInvalidMemcpyDirection": 21, "cudaErrorAddressOfConstant": 22, "cudaErrorTextureFetchFailed": 23,
    "cudaErrorTextureNotBound": 24, "cudaErrorSynchronizationError": 25, "cudaErrorInvalidFilterSetting": 26,
    "cudaErrorInvalidNormSetting": 27, "cudaErrorMixedDeviceExecution": 28, "cudaErrorNotYetImplemented": 31,
    "cudaErrorMemoryValueTooLarge": 32, "cudaErrorStubLibrary": 34, "cudaErrorInsufficientDriver": 35,
    "cudaErrorCallRequiresNewerDriver": 36, "cudaErrorInvalidSurface": 37, "cudaErrorDuplicateVariableName": 43,
    "cudaErrorDuplicateTextureName": 44, "cudaErrorDuplicateSurfaceName": 45, "cudaErrorDevicesUnavailable": 46,
    "cudaErrorIncompatibleDriverContext": 49, "cudaErrorMissingConfiguration": 52, "cudaErrorPriorLaunchFailure": 53,
    "cudaErrorLaunchMaxDepthExceeded": 65, "cudaErrorLaunchFileScopedTex": 66, "cudaErrorLaunchFileScopedSurf": 67,
    "cudaErrorSyncDepthExceeded": 68, "cudaErrorLaunchPendingCountExceeded": 69, "cudaErrorInvalidDeviceFunction": 98,
    "cudaErrorNoDevice": 100, "cudaErrorInvalidDevice": 101, "cudaErrorDeviceNotLicensed": 102,
    "cudaErrorSoftwareValidityNotEstablished": 103, "cudaErrorStartupFailure": 127, "cudaErrorInvalidKernelImage": 200,
    "cudaErrorDeviceUninitialized": 201, "cudaErrorMapBufferObjectFailed": 205,
    "cudaErrorUnmapBufferObjectFailed": 206, "cudaErrorArrayIsMapped": 207, "cudaErrorAlreadyMapped": 208,
    "cudaErrorNoKernelImageForDevice": 209, "cudaErrorAlreadyAcquired": 210, "cudaErrorNotMapped": 211,
    "cudaErrorNotMappedAsArray": 212, "cudaErrorNotMappedAsPointer": 213, "cudaErrorECCUncorrectable": 214,
    "cudaErrorUnsupportedLimit": 215, "cudaErrorDeviceAlreadyInUse": 216, "cudaErrorPeerAccessUnsupported": 217,
    "cudaErrorInvalidPtx": 218, "cudaErrorInvalidGraphicsContext": 219, "cudaErrorNvlinkUncorrectable": 220,
    "cudaErrorJitCompilerNotFound": 221, "cudaErrorUnsupportedPtxVersion": 222, "cudaErrorJitCompilationDisabled": 223,
    "cudaErrorUnsupportedExecAffinity": 224, "cudaErrorUnsupportedDevSideSync": 225, "cudaErrorContained": 226,
    "cudaErrorInsufficientLoaderVersion": 227, "cudaErrorInvalidSource": 300, "cudaErrorFileNotFound": 301,
    "cudaErrorSharedObjectSymbolNotFound": 302, "cudaErrorSharedObjectInitFailed": 303,
    "cudaErrorOperatingSystem": 304, "cudaErrorInvalidResourceHandle": 400, "cudaErrorIllegalState": 401,
    "cudaErrorLossyQuery": 402, "cudaErrorSymbolNotFound": 500, "cudaErrorNotReady": 600,
    "cudaErrorIllegalAddress": 700, "cudaErrorLaunchOutOfResources": 701, "cudaErrorLaunchTimeout": 702,
    "cudaErrorLaunchIncompatibleTexturing": 703, "cudaErrorPeerAccessAlreadyEnabled": 704,
    "cudaErrorPeerAccessNotEnabled": 705, "cudaErrorSetOnActiveProcess": 708, "cudaErrorContextIsDestroyed": 709,
    "cudaErrorAssert": 710, "cudaErrorTooManyPeers": 711, "cudaErrorHostMemoryAlreadyRegistered": 712,
    "cudaErrorHostMemoryNotRegistered": 713, "cudaErrorHardwareStackError": 714, "cudaErrorIllegalInstruction": 715,
    "cudaErrorMisalignedAddress": 716, "cudaErrorInvalidAddressSpace": 717, "cudaErrorInvalidPc": 718,
    "cudaErrorLaunchFailure": 719, "cudaErrorCooperativeLaunchTooLarge": 720, "cudaErrorTensorMemoryLeak": 721,
    "cudaErrorNotPermitted": 800, "cudaErrorNotSupported": 801, "cudaErrorSystemNotReady": 802,
    "cudaErrorSystemDriverMismatch": 803, "cudaErrorCompatNotSupportedOnDevice": 804,
    "cudaErrorMpsConnectionFailed": 805, "cudaErrorMpsRpcFailure": 806, "cudaErrorMpsServerNotReady": 807,
    "cudaErrorMpsMaxClientsReached": 808, "cudaErrorMpsMaxConnectionsReached": 809,
    "cudaErrorMpsClientTerminated": 810, "cudaErrorCdpNotSupported": 811, "cudaErrorCdpVersionMismatch": 812,
    "cudaErrorStreamCaptureUnsupported": 900, "cudaErrorStreamCaptureInvalidated": 901,
    "cudaErrorStreamCaptureMerge": 902, "cudaErrorStreamCaptureUnmatched": 903, "cudaErrorStreamCaptureUnjoined": 904,
    "cudaErrorStreamCaptureIsolation": 905, "cudaErrorStreamCaptureImplicit": 906, "cudaErrorCapturedEvent": 907,
    "cudaErrorStreamCaptureWrongThread": 908, "cudaErrorTimeout": 909, "cudaErrorGraphExecUpdateFailure": 910,
    "cudaErrorExternalDevice": 911, "cudaErrorInvalidClusterSize": 912, "cudaErrorFunctionNotLoaded": 913,
    "cudaErrorInvalidResourceType": 914, "cudaErrorInvalidResourceConfiguration": 915, "cudaErrorStreamDetached": 917,
    "cudaErrorGraphRecaptureFailure": 918, "cudaErrorFabricNotReady": 919, "cudaErrorUnknown": 999,
}  # fmt: skip
NAMES = {code: name for name, code in CODES.items()}

_NUMBERED = re.compile(r"CUDA (?:failure|error)[ :]+(\d+)")  # cuda_call.cc
# "CUDA error NAME:text" is what ONNX Runtime says of a kernel that was not launched (cuda_kernel.h), "NAME: text" what
# thrust says (system_error.h).
_NAMED = re.compile(r"\b(cudaError[A-Z]\w*):")


def code_in(text: str) -> int | None:
    """The code of the CUDA error that a text reports. None: it reports none, or one that CUDA 13.0 does not have."""
    if match := _NUMBERED.search(text):
        return int(match[1])
    return next((CODES[name] for name in _NAMED.findall(text) if name in CODES), None)
