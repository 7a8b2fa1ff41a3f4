// The version of attn. CMakeLists.txt reads it from here, so that it is written once.
#pragma once

#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 2
#define ATTN_VERSION_PATCH 0
