-- What Quarto does for `report.qmd`, as far as the report uses it, for plain pandoc: conditional content, callouts,
-- numbered figures and tables, and references (`@fig-loss` becomes the link "Figure 3"). That no label stands twice and
-- every reference has a target is checked before (report/check.py); a reference to nothing is shown as such.

local is_html = FORMAT:match("html") ~= nil
local labels = {}      -- label -> "Figure 3"
local counters = { fig = 0, tbl = 0 }
local words = { fig = "Figure", tbl = "Table", sec = "Section" }
local nbsp = "\u{a0}"

local function visible(element)
  if not element.classes:includes("content-visible") then return nil end
  local hidden = element.attributes["when-format"] == "html" and not is_html
    or element.attributes["unless-format"] == "html" and is_html
  return hidden and {} or element.content
end

local function kind_of(identifier)
  return identifier:match("^(%a+)%-")
end

-- A figure or table div: its last paragraph is the caption.
local function captioned(div, kind)
  counters[kind] = counters[kind] + 1
  local name = words[kind] .. nbsp .. counters[kind]
  labels[div.identifier] = name
  local content = div.content:clone()
  local last = content:remove()
  local caption = last.content:clone()
  caption:insert(1, pandoc.Space())
  caption:insert(1, pandoc.Strong(name .. "."))
  if kind == "tbl" and not is_html then
    -- typst takes the caption with the table itself, so that the table may break across pages.
    for _, block in ipairs(content) do
      if block.t == "Table" then
        block.caption = { long = { pandoc.Plain(caption) } }
        block.attr = pandoc.Attr(div.identifier)
      end
    end
    return content
  end
  return pandoc.Figure(content, { pandoc.Plain(caption) }, pandoc.Attr(div.identifier, { kind == "tbl" and "table" or "image" }))
end

local function callout(div, kind)
  local title = div.attributes.title or kind
  if is_html then
    local content = div.content:clone()
    content:insert(1, pandoc.Div(pandoc.Plain(title), pandoc.Attr("", { "box-title" })))
    return pandoc.Div(content, pandoc.Attr("", { "box", "box-" .. kind }))
  end
  local content = div.content:clone()
  content:insert(1, pandoc.Para(pandoc.Strong(title)))
  content:insert(1, pandoc.RawBlock("typst", '#callout("' .. kind .. '")['))
  content:insert(pandoc.RawBlock("typst", "]"))
  return content
end

local conditional = { Div = visible, Span = visible }

local structure = {
  Div = function(div)
    local kind = kind_of(div.identifier)
    if counters[kind] then return captioned(div, kind) end
    for _, class in ipairs(div.classes) do
      local box = class:match("^callout%-(%a+)$")
      if box then return callout(div, box) end
    end
  end,
}

local details = {
  Image = function(image)
    image.attributes.alt = image.attributes["fig-alt"]
    image.attributes["fig-alt"] = nil
    return image
  end,
}

local function number_sections(doc)
  local numbers = { 0, 0, 0, 0, 0, 0 }
  for _, block in ipairs(doc.blocks) do
    if block.t == "Header" then
      if block.classes:includes("unnumbered") then
        labels[block.identifier] = "“" .. pandoc.utils.stringify(block) .. "”"
      else
        numbers[block.level] = numbers[block.level] + 1
        for level = block.level + 1, 6 do numbers[level] = 0 end
        labels[block.identifier] = "Section" .. nbsp .. table.concat(numbers, ".", 1, block.level)
      end
    end
  end
end

local references = {
  Cite = function(cite)
    local out = pandoc.Inlines({})
    for index, citation in ipairs(cite.citations) do
      if not words[kind_of(citation.id) or ""] then return cite.content end
      if index > 1 then out:extend({ pandoc.Str(","), pandoc.Space() }) end
      local name = labels[citation.id]
      out:insert(name and pandoc.Link(name, "#" .. citation.id) or pandoc.Emph(citation.id .. " (not produced)"))
    end
    return out
  end,
  Link = function(link)
    local target = link.target:match("^#(.*)")
    if target and not labels[target] then return link.content end
  end,
  Table = function(table)
    if is_html then return pandoc.Div(table, pandoc.Attr("", { "table-box" }, { tabindex = "0" })) end
  end,
}

function Pandoc(doc)
  doc = doc:walk(conditional):walk(structure):walk(details)
  number_sections(doc)
  local function note(element)
    if element.identifier ~= "" and not labels[element.identifier] then labels[element.identifier] = element.identifier end
  end
  doc:walk({ Span = note, Div = note, Figure = note, Table = note, Header = note })
  return doc:walk(references)
end
